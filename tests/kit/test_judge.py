"""The judge: the measurement that it keeps for a bound, and its messages about values that differ."""

import numpy
import pytest
import torch

from lab.harness import diagnose, judge, layouts, mistakes


def test_keep_prefers_measurement_nearest_its_upper_bound():
    kept: dict[str, judge.Measurement] = {}
    for value, expected in ((3, 4), (2, 4), (6, 12)):
        judge.keep(kept, [judge.Measurement("bytes", value, expected, at_most=True)])
        judge.keep(kept, [judge.Measurement("messages", value, expected)])
    assert (kept["bytes"].value, kept["messages"].value) == (3, 6)


def test_only_passed_comparisons_are_recorded_as_measurements(monkeypatch):
    monkeypatch.setattr(judge, "MEASURED", kept := [])
    judge.close(torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3), "y")
    judge.close(torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(3), "y")
    judge.measured("no number", None, 1)
    assert [(m.value, m.at_most) for m in kept] == [(0, True), (0, True)]
    off(torch.ones(3), torch.zeros(3))
    assert len(kept) == 2, "what failed is told by its message"


def off(got: torch.Tensor, want: torch.Tensor, **options) -> str:
    with pytest.raises(AssertionError) as error:
        judge.close(got, want.double(), want, "y", **options)
    return str(error.value)


def test_numbers_that_differ_look_different():
    assert judge.distinct_digits(1.5, 1.25) == ("1.5", "1.25")
    assert judge.distinct_digits(0.05, 0.05 + 3e-10) == ("0.05", "0.0500000003")
    assert judge.distinct_digits(1.0 + 2**-50, 1.0) == ("1.000000000000001", "1")
    assert judge.distinct_digits(float("nan"), 1.0) == ("nan", "1")


WANT = torch.linspace(-1.7, 1.3, 90).view(2, 9, 5)
DENSE = torch.linspace(-2, 2, 4001).half()


def changed(index: tuple, delta: float) -> torch.Tensor:
    got = WANT.clone()
    got[index] += delta
    return got


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (4 * WANT, WANT, "all of them are 4 times what is expected: the mean"),
        (changed((1, 2, 0), torch.nan), WANT, "1 of them are not finite"),
        (WANT.mT, WANT, "expected shape (2, 9, 5), got (2, 5, 9): the mean"),
        (changed(numpy.s_[:, 7:], 1), WANT, "; all of these at query 7 … 8 of 9"),
        (changed(numpy.s_[:, 1::2], 1), WANT, "; all of these at one query in 2, from 1 on"),
        (WANT.half().float(), WANT, "each is a number of float16"),
        (torch.tensor(36 * 1.37), torch.tensor(1.37), "that is 36 times what is expected"),
    ],
)
def test_message_describes_pattern_and_place_of_wrong_values(got, want, words):
    assert words in off(got, want, cause="the mean", dims="batch, query, dim")


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (torch.cat([3 * WANT[:1], WANT[1:]]), "those that are off are all 3 times what is expected"),
        (changed(numpy.s_[:, 7:], 1), "those that are off are all 1 above what is expected"),
        (WANT.flip(0), "the expected numbers, shifted along batch by 1"),
        (WANT.flatten()[torch.arange(90) * 7 % 90].view(WANT.shape), "the expected numbers, in another order"),
    ],
)
def test_looks_like_line_is_added_outside_the_fingerprint(got, words):
    with pytest.raises(judge.Judged) as error:
        judge.close(got, WANT.double(), WANT, "y", dims="batch, query, dim", cause="the mean")
    message, looks = str(error.value), f"{diagnose.LOOKS}{words}"
    assert message.endswith(f"\n{looks}")
    text = mistakes.added("", message, error.value.cause)
    assert text.startswith(f"{looks}\nCheck: the mean\ny: ")
    assert mistakes.fingerprint(mistakes.without_cause(text)) == mistakes.fingerprint(
        message.removesuffix(f"\n{looks}")
    )


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (10_240 + 480, "480 too many, that is a row"), (10_240 - 240, "240 too few, that is 0.5 times a row"),
        (10_240 + 64, "64 too many, that is 2 times the head"), (10_239, "off by 1 alone"), (10_240 + 7, ""),
    ],
)  # fmt: skip
def test_a_count_that_is_off_by_a_part_names_the_part(got, words):
    hint = diagnose.in_parts(got, 10_240, {"a row": 480, "the head": 32})
    assert hint.startswith(f"\n{diagnose.LOOKS}{words}") if words else hint == ""


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (WANT.sin(), WANT, "Looks like"),
        (WANT + 1, WANT, "all of these"),
        (torch.ones(30), torch.linspace(-2, 2, 30), "each is"),
        (torch.tensor(4.34), torch.tensor(1.37), "times"),
        (DENSE[torch.arange(4001) * 7 % 4001], DENSE, "another order"),  # values closer than the tolerance
    ],
)
def test_message_claims_no_pattern_that_the_values_lack(got, want, words):
    assert words not in off(got, want, dims="batch, query, dim" if got.ndim == 3 else "")


def test_the_operand_whose_layout_makes_the_difference_is_named():
    def right_unless_sliced(layout: dict[str, str]) -> None:
        if layout["w"] == "sliced" or layout["x"] == "one number":
            raise judge.Judged("y is off", "its formula")

    def never_right(layout: dict[str, str]) -> None:
        raise judge.Judged("y is off", "its formula")

    def hint(check, **layout: str) -> str:
        with pytest.raises(judge.Judged, match="y is off: its formula") as error:
            layouts.blame(layout, check)
        return str(error.value).partition(diagnose.LOOKS)[2]

    start = "right where all operands are contiguous in memory, wrong where "
    assert hint(right_unless_sliced, x="odd offset", w="sliced").startswith(f"{start}w is sliced and all else")
    assert hint(right_unless_sliced, x="one number", w="sliced").startswith(f"{start}x is one number or w is sliced")
    assert hint(never_right, x="odd offset", w="sliced") == ""
    layouts.blame({"x": "sliced", "w": "contiguous"}, right_unless_sliced)
