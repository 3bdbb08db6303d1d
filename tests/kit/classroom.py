"""Shared by tests of the grader: made-up results, gradebooks of them, commands, one-line errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader.cli import app
from grader.gradebook import Gradebook
from grader.graded import Graded, Run
from lab.course.scoring import Result

RUN = {"seed": "5ec2e75eed", "profile": "tour", "isolation": "process", "assignment": "f" * 64}
A_RUN = Run(1, started="2026-01-31 23:59:59", versions={"torch": "2.13.0"}, commit="c0ffee", **RUN)


def result(id: str = "ddp.naive", outcome: str = "passed", kind: str = "numerics", test: str = "a", **fields) -> Result:
    fields = {"case": "", "reason": "assertion" if outcome == "failed" else "", **fields}
    return Result(id, kind, f"tests/x/test_x.py::test_{test}", fields.pop("case"), outcome, **fields)


def passed(ids: Iterable[str]) -> list[Result]:
    return [result(id) for id in ids]


def recorded(out: Path, *graded: Graded, **run: object) -> int:
    """Record these submissions as a new run in the gradebook of `out`. Return the run's number."""
    with Gradebook(out / "gradebook.sqlite") as book:
        number = book.start_run(**{**RUN, **run})
        for g in graded:
            book.record(number, g)
        return number


def reading(out: Path) -> Gradebook:
    return Gradebook(out / "gradebook.sqlite", write=False)


def latest(out: Path) -> dict[str, Graded]:
    with reading(out) as book:
        run = book.latest_run()
        return book.graded(run.id) if run else {}


def invoke(out: Path, *arguments: object) -> str:
    """Run a command and return its output. Exceptions that `grader` would print are raised."""
    done = CliRunner().invoke(app, [*(str(a).format(out=out) for a in arguments), "--out", str(out)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@contextmanager
def raises_one_line(kind: type[Exception], *words: str) -> Iterator[None]:
    """Assert that the block raises an exception of this kind, in one line with these words."""
    with pytest.raises(kind) as caught:
        yield
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value), caught.value
