"""A known mistake is named for the messages of its mutant, and for no others."""

import json
from pathlib import Path

import pytest

from grader import judge
from grader.mutants import read
from lab.course.assignment import default
from lab.course.scoring import Result
from lab.harness import mistakes

TEST = "tests/ddp/test_naive.py::test_means[2]"
RECORDED = [s.name for s in default().stages if mistakes.file(s.name).is_file()]


@pytest.fixture
def known(tmp_path, monkeypatch):
    (tmp_path / "tests" / "ddp").mkdir(parents=True)
    monkeypatch.setattr(mistakes, "ROOT", tmp_path)
    mistakes.read.cache_clear()

    def write(**messages: str) -> None:
        seen = [[*mistakes.fingerprint(message), [name]] for name, message in messages.items()]
        path = mistakes.file("ddp")
        conditions = {name: f"{name} is wrong" for name in messages}
        path.write_text(json.dumps({"when": conditions, "tests": {TEST: seen}}))
        mistakes.read.cache_clear()

    yield write
    mistakes.read.cache_clear()


OFF = "rank 1: got 0.517, expected 1,000"
GREW = "2 ranks: the process grew by 124 MB, expected at most 55: outputs take 47 MB"


@pytest.mark.parametrize(
    ("recorded", "message", "is_told"),
    [
        (OFF, "rank 1: got 0.51701, expected 1,000", True),
        (OFF, "rank 1: got 0.53, expected 1,000", False),
        (OFF, "rank 1: got 0.517, expected 1,000, not 3", False),
        (GREW, GREW.replace("124", "110"), True),  # the kernel's measurements are compared roughly
        (GREW, GREW.replace("2 ranks", "3 ranks"), False),
    ],
)
def test_mistake_matches_same_words_and_similar_numbers(known, recorded, message, is_told):
    known(sum=recorded)
    text = mistakes.explain(TEST, message)
    assert text.endswith("when sum is wrong.") == bool(text) == is_told
    assert mistakes.explain(TEST.replace("[2]", "[3]"), message) == ""


def test_first_line_lists_all_possible_causes(known):
    known(sum="got 1.23\nthe inputs", mean="got 1.23\nthe inputs")
    added = mistakes.added(TEST, "got 1.23\nthe inputs")
    assert added == "The same comes out when sum is wrong; or when mean is wrong.\ngot 1.23\nthe inputs"
    assert mistakes.without_cause(added) == "got 1.23\nthe inputs"


@pytest.mark.parametrize("message", ["got 0, expected 17", "got nan, expected 0.5", "eval() was called"])
def test_common_message_comes_before_an_example_mistake(known, message):
    known(sum=f"{message}: divide\nthe inputs")
    added = mistakes.added(TEST, f"{message}: divide\nthe inputs")
    example = "The same comes out, for example, when sum is wrong."
    assert added == f"{message}: divide\n{example}\nthe inputs"
    assert mistakes.without_cause(added) == f"{message}: divide\nthe inputs"
    checked = mistakes.added(TEST, f"{message}: divide\nthe inputs", likely="divide\nthe inputs")
    assert checked == f"Check: divide\nthe inputs\n{message}\n{example}"


def test_constant_number_in_messages_does_not_identify_a_mistake(known):
    known(sum="got 1, expected 52,288", mean="got 2, expected 52,288")
    assert mistakes.explain(TEST, "got 1, expected 52,288").startswith(mistakes.EXAMPLE)


def test_cause_is_withdrawn_when_a_test_it_would_fail_passes(known):
    known(sum="got 1.23")
    stage, other = mistakes.read("ddp"), TEST.replace("[2]", "[3]")
    mistakes.write("ddp", stage["when"], {**stage["tests"], other: [["words", [], ["sum"]]]})
    mistakes.read.cache_clear()
    first = Result("ddp.naive", "numerics", TEST[:-3], "2", "failed", "assertion", mistakes.added(TEST, "got 1.23"))
    assert first.message.startswith(mistakes.SAME_WHEN)
    later = Result("ddp.naive", "numerics", TEST[:-3], "3", "passed")
    (row, _) = mistakes.explained_again([first, later])
    remark = "Not quite this mistake: sum is wrong. Then test_means[3] would fail too, but it passes."
    assert row.message == f"got 1.23\n{remark}"
    assert mistakes.without_cause(row.message) == "got 1.23"
    assert mistakes.explained_again([first]) == [first]


def test_a_failure_on_the_secret_seed_has_the_cause_of_the_public_one(known):
    known(sum="got 1.23\n2")
    secret = Result("ddp.naive", "numerics", TEST, "", "failed", "assertion", "got 7\nthe inputs")
    public = Result("ddp.naive", "numerics", TEST, "", "failed", "assertion", mistakes.added(TEST, "got 1.23\n2"))
    merged = judge._merged(secret, public, passed=())
    assert (merged.message, merged.public) == ("The same comes out when sum is wrong.\ngot 7\nthe inputs", "failed")


@pytest.mark.parametrize("stage", RECORDED)
def test_recorded_mistakes_match_existing_mutants(stage):
    reasons = {m.name: m.why for m in read("mutant", stage)}
    recorded = mistakes.read(stage)["when"]
    assert recorded.items() <= reasons.items(), f"grader mutants --record --stage {stage}"
    assert len(recorded) > 0.6 * len(reasons), "the others are not known by a message: they raise, or it varies"
    assert not [clause for clause in reasons.values() if clause.endswith(".") or len(clause.split()) > 30]


# ---- the judge: failures on the secret seed are run again on the public seed ----


def result(test: str, outcome: str, reason: str = "") -> Result:
    return Result("ddp.naive", "numerics", test, "", outcome, reason)


def judged(monkeypatch, seed: str, first: list[Result], public: list[Result] = ()) -> tuple[list[Result], list]:
    """Return the judge's results for these results, and (seed, tests) of each run that it requested."""
    runs = []

    def run_tests(runner, ids, seed, cache, only=None, **options):
        runs.append((seed, only))
        return public if len(runs) > 1 else first

    monkeypatch.setattr(judge, "run_tests", run_tests)
    return judge.judge(None, ["ddp.naive"], seed, Path("cache")), runs


def test_judge_reruns_only_failures_that_depend_on_the_seed(monkeypatch):
    secret = [
        result("right", "passed"), result("fits", "failed", "assertion"), result("wrong", "failed", "raised"),
        result("missing", "failed", "unwritten"),
    ]  # fmt: skip
    public = [result("fits", "passed"), result("wrong", "failed", "assertion")]
    got, runs = judged(monkeypatch, "s3cret", secret, public)
    assert runs == [("s3cret", None), ("public", {"fits", "wrong"})]
    assert {r.test: r.public for r in got} == {"right": "", "fits": "passed", "wrong": "failed", "missing": ""}
    assert [r.outcome for r in got] == ["passed", "failed", "failed", "failed"], "the secret seed decides"


@pytest.mark.parametrize(("seed", "kind"), [("s3cret", "timing"), ("public", "numerics")])
def test_timing_and_public_seed_failures_are_not_rerun(monkeypatch, seed, kind):
    failed = Result("ddp.naive", kind, "slow", "", "failed", "assertion")
    assert judged(monkeypatch, seed, [failed]) == ([failed], [(seed, None)])
