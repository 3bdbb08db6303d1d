"""The summary at the end of a student's `pytest tests/`, and the results that a session saves for the next one."""

import dataclasses
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from grader.graded import Graded
from grader.report.exports import gradescope
from lab.commands import status
from lab.course.assignment import KIND_QUESTIONS, ROOT, default
from lab.course.listing import inputs
from lab.course.scoring import Result, score, unattempted
from lab.harness import summary
from lab.harness.progress import Progress
from lab.harness.verdicts import VERDICTS, Verdicts

FIRST = "ddp.naive"  # other exercises need it


def result(id: str, outcome: str = "passed", **fields) -> Result:
    return Result(id, "numerics", f"tests/x/test_x.py::test_{id.partition('.')[2]}", "", outcome, **fields)


CONFIG = SimpleNamespace(
    stash={VERDICTS: SimpleNamespace(passes=lambda id: True, replaced={})}, option=SimpleNamespace(impl="student")
)


def fake_terminal() -> tuple[list[str], SimpleNamespace]:
    """Return a list of lines, and a terminal that writes to it."""
    lines: list[str] = []
    return lines, SimpleNamespace(write_line=lambda line, **colour: lines.append(line), verbosity=-1)


def test_summary_lists_passing_cases_beside_failing_ones():
    lines, terminal = fake_terminal()
    cases = [dataclasses.replace(result(FIRST, "failed", message="off"), case=case) for case in ("half", "single")]
    summary._failures(terminal, cases)
    assert not any("passes" in line for line in lines)
    summary._failures(terminal, [*cases, dataclasses.replace(result(FIRST), case="double")])
    assert "  this test fails in [half, single] and passes in [double]" in lines


def test_untouched_stub_is_not_attempted_and_next_follows_last_attempt():
    stub = result(FIRST, "failed", reason="unwritten", message="not written")
    lines, terminal = fake_terminal()
    summary.write(terminal, [stub, result("flash_attention.speed", "not_run", reason="no GPU")], CONFIG)
    assert any(line.startswith(f"next: {FIRST}") for line in lines), "what did not run was not tried"
    lines.clear()
    summary.write(terminal, [stub, result("ddp.flat"), dataclasses.replace(stub, exercise="ddp.overlapped")], CONFIG)
    assert not any("numerics" in line for line in lines), "nothing is wrong with what nobody wrote"
    assert sum(line.endswith("not attempted") for line in lines) == 2
    assert any(line.startswith("next: ddp.overlapped") for line in lines), "behind what was tried, not before"
    half = [stub, dataclasses.replace(stub, test="t::test_2", outcome="passed", reason="")]
    assert unattempted(half) == set()
    assert unattempted([stub, dataclasses.replace(stub, outcome="not_run", reason="no GPU")]) == {FIRST}
    (points,) = score(default(), [stub], [FIRST])
    assert (points.attempted, points.earned, points.possible) == (False, 0, points.exercise.points)


def test_failure_message_is_cut_after_seven_lines_unless_verbose():
    lines, terminal = fake_terminal()
    failure = result(FIRST, "failed", reason="assertion", message="\n".join(f"line {i}" for i in range(9)))
    summary._failures(terminal, [failure])
    assert [line for line in lines if "line" in line] == [f"  line {i}" for i in range(7)] + [
        "  … 2 more lines with -v"
    ]
    assert f"numerics: {KIND_QUESTIONS['numerics']}" in lines
    lines.clear()
    terminal.verbosity = 0
    summary._failures(terminal, [failure])
    assert "  line 8" in lines


def test_method_hint_is_left_out_when_only_refusal_tests_fail():
    """Holds for the summary, lab and Gradescope. After another failure the hint is shown again."""
    id = next(iter(default().exercises))  # the exercise that lab suggests on a fresh tree
    hint = default().exercise(id).hints[0]
    refusal = dataclasses.replace(result(id, "failed", reason="assertion", message="off"), test="t::test_0_is_refused")
    for results, expected in (([refusal], False), ([refusal, result(id, "failed", reason="assertion")], True)):
        lines, terminal = fake_terminal()
        summary.write(terminal, results, CONFIG)
        out = Console(file=io.StringIO(), width=400)
        status.show(Progress(results, {id: {}}), out)
        (entry,) = gradescope(Graded("ada", results=results), default(), [id])["tests"]
        folded = " ".join(" ".join(lines).split())
        assert [hint in folded, f"hint: {hint}" in out.file.getvalue(), hint in entry["output"]] == [expected] * 3


def test_interrupted_exercise_gets_no_verdict():
    lines, terminal = fake_terminal()
    summary.write(terminal, [result(FIRST), result("ddp.flat")], CONFIG, {"ddp.flat": (1, 9)})
    assert "ddp.flat: stopped after 1 of 9 tests: no verdict yet" in lines
    assert [line.partition(" ")[0] for line in lines if "✓" in line] == [FIRST]
    assert not any(line.startswith("next: ") for line in lines)


def test_failure_inputs_are_one_line_of_rounded_python_literals():
    """Whole numbers keep all digits, other numbers six."""
    case = {"bytes": 781468467, "options": {"backward_s": 0.0032831605701630576, "sizes": [1.0, 2]}, "overlap": True}
    head, line = f"expected 1, got 2{inputs(case)}".split("\n")
    assert head == "expected 1, got 2"
    assert line.startswith("given ")
    rounded = {"bytes": 781468467, "options": {"backward_s": 0.00328316, "sizes": [1.0, 2]}, "overlap": True}
    assert eval(line.removeprefix("given ")) == rounded


def session(folder, outcomes, judging) -> Verdicts:
    config = SimpleNamespace(option=SimpleNamespace(expect_cache=folder, seed="public"))
    runner = SimpleNamespace(executor=SimpleNamespace(source=ROOT / "reference"), verdicts={})
    results = [Result(FIRST, "numerics", f"test_{n}", "", outcome) for n, outcome in enumerate(outcomes)]
    verdicts = Verdicts(config, runner, results)
    verdicts.numerics_count = {FIRST: judging}
    return verdicts


@pytest.mark.parametrize(
    ("outcomes", "judging", "kept"),
    [
        (["passed", "passed"], 2, True),
        (["passed", "failed"], 2, False),
        (["passed"], 2, None),
        (["passed", "inconclusive"], 2, None),
    ],
)
def test_conclusive_verdict_is_kept_for_the_next_session(tmp_path, outcomes, judging, kept):
    session(tmp_path, outcomes, judging).keep()
    later = session(tmp_path, [], None)
    calls = []
    later._ask = lambda id: calls.append(id) or True
    assert later.passes(FIRST) is (kept is not False)
    assert calls == ([FIRST] if kept is None else [])
