"""Turns the outcome of a test into a Result, with a message for the person who wrote the code."""

import pytest

from ..course import assignment as assignments
from ..course.scoring import Result
from . import error_hints, mistakes
from .judge import TIMING_MESSAGES, Inconclusive
from .runner import ExecutorLost, ProbeFailed


def mark_of(item: pytest.Item) -> tuple[str, str]:
    """The id of the exercise that a test judges, and the test's kind; ("", "") if it judges none."""
    mark = item.get_closest_marker("exercise")
    return (mark.args[0], mark.kwargs["kind"]) if mark else ("", "")


def result(
    item: pytest.Item, call: pytest.CallInfo, report: pytest.TestReport, printed: str, before: list[Result]
) -> Result:
    """Make the Result of an exercise's test. before: this session's results so far."""
    (id, kind), (base, _, case) = mark_of(item), item.nodeid.partition("[")
    outcome, reason, message, output = "passed", "", "; ".join(TIMING_MESSAGES), ""
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Inconclusive):
        outcome, reason = "inconclusive", str(error).removeprefix("inconclusive: ")
    elif report.skipped:
        outcome, reason = "not_run", str(report.longrepr[2] if isinstance(report.longrepr, tuple) else error)
    elif isinstance(error, ProbeFailed) and error.reason == "busy":
        outcome, reason = "inconclusive", error.text
    elif isinstance(error, ProbeFailed):
        outcome, reason, output = "failed", error.reason, error.output
        message = _explain(error, id)
    elif isinstance(error, AssertionError):
        outcome, reason, message = "failed", "assertion", str(error).partition("\nassert ")[0]
        known = item.nodeid if item.config.option.seed == mistakes.PUBLIC else ""
        passed = {r.id for r in before if r.outcome == "passed"}
        message = mistakes.added(known, message, getattr(error, "cause", ""), passed)
        output = printed
    elif isinstance(error, ExecutorLost):
        outcome, reason, message = "failed", "kit", str(error)
    elif error is not None:  # the test itself raised, because it cannot handle the returned value
        outcome, reason = "failed", "refused"
        message = f"unexpected return value: the test raised {type(error).__name__}: {error}"
        output = printed
    return Result(
        id, kind, base, case.rstrip("]"), outcome, reason, message, report.duration, output,
        instrumented=kind != "numerics",
    )  # fmt: skip


def _explain(error: ProbeFailed, id: str) -> str:
    """Explain a probe's failure to the person who wrote the code."""
    exercise = assignments.default().exercise(id)
    prefix = "" if error.rank is None else f"rank {error.rank}: "
    if error.reason == "unwritten":
        return f"{error.text}\nnot written yet: {exercise.object}\nhint: {exercise.hints[0]}"
    start = {
        "raised": f"{prefix}{error_hints.with_remedy(error.text)}",
        "import": f"{prefix}{exercise.file} does not load: {error.text}",
        "refused": f"{prefix}the return value cannot be judged: {error.text}",
        "forbidden": error.text,
        "crashed": f"{prefix}{error.text}",
        "hung": f"no answer in time: {error.text}",
    }.get(error.reason, error.text)
    return "\n".join(filter(None, (start, error.where and f"at {error.where}", error.stacks)))
