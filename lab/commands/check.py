"""Runs the tests of some exercises in this process, and watches student/: `lab check`, `lab watch`.

Imports take most of the time. So pytest runs in this process, reads only the test files of the chosen exercises, and
loads no plugins but ours. The zygote, which also imports torch, starts first. `lab watch` keeps both running, so tests
take about a second after a file is saved.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..course.assignment import ROOT, Exercise
from ..harness.executor import Executor, Zygote
from ..harness.progress import STUDENT

if TYPE_CHECKING:
    from ..harness.runner import Runner

INTERRUPTED = 2  # pytest's exit code for Ctrl-C
POLL_S = 0.25  # time between checks of the files; checking a hundred files takes less than a millisecond


@contextlib.contextmanager
def warm() -> Iterator[Runner]:
    """Make a runner for student/, and start its zygote in the background."""
    zygote = Zygote(Executor(STUDENT), "interpret")
    from ..harness.runner import Runner  # imports torch while the zygote starts

    runner = Runner(Executor(STUDENT))
    runner.zygotes["interpret"] = zygote
    try:
        yield runner
    finally:
        runner.close()


def run(exercises: Iterable[Exercise], runner: Runner) -> int:
    """Run all tests of these exercises, store their results, and return pytest's exit code."""
    exercises = list(exercises)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    from ..harness.verdicts import LentRunner

    runner.forget()
    ids = [argument for e in exercises for argument in ("--exercise", e.id)]
    files = [str(f) for e in exercises for f in tests_of(e)]
    options = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    return int(pytest.main([*dict.fromkeys(files), *ids, *options], plugins=[LentRunner(runner)]))


def leave(code: int) -> NoReturn:
    """End this process at once: torch's teardown would take half a second."""
    with contextlib.suppress(OSError):  # the process that read our output has ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def tests_of(exercise: Exercise) -> list[Path]:
    """Test files of the exercise's stage that name the exercise."""
    files = sorted((ROOT / "tests" / exercise.stage).glob("test_*.py"))
    return [f for f in files if f'"{exercise.id}"' in f.read_text(encoding="utf-8")]


def watch(check: Callable[[Runner, list[str]], int | None]) -> None:
    """Call `check` now, and again with the changed files whenever files in student/ are saved, until Ctrl-C."""
    with warm() as runner, contextlib.suppress(KeyboardInterrupt):
        stamps, files = _file_stamps(), list[str]()
        while check(runner, files) != INTERRUPTED:
            before = stamps
            while (stamps := _stable_stamps()) == before:
                time.sleep(POLL_S)
            files = sorted(file for file in {*before, *stamps} if before.get(file) != stamps.get(file))


def _stable_stamps() -> dict[str, tuple[int, int]]:
    """Wait until no file changes any more, since editors write in several steps; then return their stamps."""
    stamps = _file_stamps()
    while True:
        time.sleep(POLL_S / 5)
        if (later := _file_stamps()) == stamps:
            return stamps
        stamps = later


def _file_stamps() -> dict[str, tuple[int, int]]:
    """{file: (modification time in ns, size in bytes)} of all Python files in student/."""
    found = {}
    for file in STUDENT.rglob("*.py"):
        with contextlib.suppress(OSError):  # an editor has just renamed it
            status = file.stat()
            found[file.relative_to(ROOT).as_posix()] = (status.st_mtime_ns, status.st_size)
    return found
