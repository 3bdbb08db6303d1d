"""The kernel that computes dq, and delta = rowsum(do ∘ o).

Must hold: dq and delta are those of attention in float64, from the o and lse that are passed in; one kernel recomputes
the scores, tile by tile. Typical fakes: torch does the work (caught by recording its operators, and because torch.empty
is NaN until a kernel writes); no causal mask in backward; a softmax with its own maximum and sum instead of lse (caught
because a shifted lse must shift dq); no delta (caught because do and o are independent).
"""

import functools

import pytest
import torch

from lab.harness import layouts
from lab.harness.pytest_plugin import exercise

from . import judged
from .oracles import MODES, PRECISIONS, draw, lengths, needs_triton

DQ = "flash_attention.triton_backward_dq"
LENGTHS = "does the last tile stop where queries and keys do? With a mask query i sees keys 0 … i, in backward, too"
STRIDES = "are all strides used, and each for its own tensor, do and o too?"
pytestmark = [needs_triton, pytest.mark.parametrize("where", MODES)]


def without_delta(given: dict) -> dict:
    """Set o and delta to 0, so that dS = P ∘ dP."""
    return given | {name: torch.zeros_like(given[name]) for name in ("o", "delta")}


@pytest.fixture
def check(run, rng, expect, where):
    return functools.partial(judged.check, "dq", run, rng, expect, where=where)


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_fit_no_tile(check, rng, dtype, is_causal):
    for sizes in lengths(rng):
        check(draw(rng, *sizes, dtype=dtype, dim=rng.choice([16, 24, 40])), is_causal, LENGTHS)


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("case", range(5))
def test_any_strides(check, rng, case):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16, dtype="float16")
    given, layout = layouts.different(rng, **dict(zip(("q", "k", "v", "do"), drawn, strict=True)))
    layout["o"] = rng.choice(sorted({*layouts.DIFFERENT[:5]} - {*layout.values()}))  # no two layouts are equal
    check(given.values(), rng.choice([False, True]), STRIDES, layout)


@exercise(DQ, kind="numerics")
def test_offsets_beyond_what_an_int32_holds(check, rng):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16)
    check(drawn, False, layouts.FAR_CAUSE, dict.fromkeys(("q", "k", "v", "do", "o"), layouts.FAR), where="interpret")


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("dim", [1, 64, 128, 256])
def test_every_width_of_a_head(check, rng, dim):
    check(draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=dim), rng.choice([False, True]))


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(check, rng, is_causal):
    group = rng.integers(2, 3)
    drawn = draw(rng, rng.integers(20, 60), rng.integers(20, 60), batch=2, heads=2, group=group, dim=16)
    check(drawn, is_causal, f"query head h uses key head h // {group}")


@exercise(DQ, kind="numerics")
def test_thousands_of_keys_are_summed_in_float32(check, rng):
    """Keys are nearly equal, so dq is a sum of thousands of terms of one sign, and grows slowly."""
    q, k, v, do = draw(rng, 8, 3000, batch=1, heads=1, dim=16, dtype="float16", scale=1 / 64)
    got = check((q, k + 4, (v + 2).abs(), do.abs() + 1), False, "accumulate in float32", change=without_delta)
    judged.check_rounded_once(got["dq"], got["want"]["dq"], "dq of 3,000 keys", "accumulate in float32")


@exercise(DQ, kind="numerics")
def test_logits_fifty_times_larger(check, rng):
    drawn = draw(rng, rng.integers(40, 100), rng.integers(40, 100), scale=50.0, dim=16)
    check(drawn, rng.choice([False, True]), "p = exp(s − lse) is at most 1; mask p itself")


@exercise(DQ, kind="numerics")
def test_keys_that_are_not_there_add_nothing(check, rng):
    """lse is far below 0. A padded key has score 0, so without the mask exp(0 − lse) overflows."""
    for is_causal in (False, True):
        q, k, v, do = draw(rng, 2 * rng.integers(10, 30) + 1, 2 * rng.integers(10, 30) + 1, dim=16)
        drawn = (q.abs() * 400, -k.abs(), v, do)
        check(drawn, is_causal, "p of a key that is not there is 0, not exp(0 − lse): mask p itself")


@exercise(DQ, kind="numerics")
def test_probabilities_come_from_the_lse_that_is_given(check, rng):
    """lse is larger than in forward, so every probability is smaller."""

    def shifted(given: dict) -> dict:
        return without_delta(given) | {"lse": given["lse"] + rng.uniform(0.5, 1.5)}

    check(draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=16), False, "P is exp(S − lse)", {}, change=shifted)


@exercise(DQ, kind="property")
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_kernel_does_the_work_and_twice_the_same(run, check, rng, is_causal, where):
    drawn = draw(rng, rng.integers(257, 300), rng.integers(257, 300), batch=1, heads=1, dim=24)
    layout = dict.fromkeys("qkv", "columns first")
    got = check(drawn, is_causal, layout=layout, keep=True)
    judged.check_single_launch(got)
    if where == "interpret" and is_causal:
        judged.check_compiles("dq", run, got, drawn, is_causal, layout)
    judged.check_deterministic(got)


@exercise(DQ, kind="property")
def test_tiles_above_the_diagonal_are_never_read(check, rng):
    drawn = draw(rng, n := rng.integers(257, 300), n, batch=1, heads=1, dim=16, dtype="float16")
    judged.check_no_tile_above_the_diagonal(check(drawn, True, keep=True, where="interpret"), n, n)
