"""Runs the tests of some exercises in this process, and watches student/: `lab check`, `lab watch`.

What takes time is imports. So pytest runs here, reads only the files that judge what is asked, and takes no plugins but
ours; the zygote, which imports torch too, starts before it. Watching keeps both: what is saved is judged in a second.
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
LOOK_S = 0.25  # between looks at the files; a hundred of them take less than a millisecond


@contextlib.contextmanager
def warm() -> Iterator[Runner]:
    """A runner for student/ whose zygote is starting."""
    zygote = Zygote(Executor(STUDENT), "interpret")
    from ..harness.runner import Runner  # imports torch, meanwhile

    runner = Runner(Executor(STUDENT))
    runner.zygotes["interpret"] = zygote
    try:
        yield runner
    finally:
        runner.close()


def run(exercises: Iterable[Exercise], runner: Runner) -> int:
    """pytest's exit code for all tests of these exercises; what they said is remembered."""
    exercises = list(exercises)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    from ..harness.verdicts import Lent

    runner.forget()
    ids = [argument for e in exercises for argument in ("--exercise", e.id)]
    files = [str(f) for e in exercises for f in judging(e)]
    options = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    return int(pytest.main([*dict.fromkeys(files), *ids, *options], plugins=[Lent(runner)]))


def leave(code: int) -> NoReturn:
    """End this process, at once: to take torch apart before would take half a second."""
    with contextlib.suppress(OSError):  # whoever reads has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def judging(exercise: Exercise) -> list[Path]:
    """Test files of its stage that name it."""
    files = sorted((ROOT / "tests" / exercise.stage).glob("test_*.py"))
    return [f for f in files if f'"{exercise.id}"' in f.read_text(encoding="utf-8")]


def watch(check: Callable[[Runner, list[str]], int | None]) -> None:
    """Call `check` now, and with the files that were saved whenever student/ is saved to, until Ctrl-C.

    Where the kit changed it begins anew.
    """
    with warm() as runner, contextlib.suppress(KeyboardInterrupt):
        kit, seen = _saved("lab", "tests"), _saved("student")
        files: list[str] = []
        while check(runner, files) != INTERRUPTED:
            while _settled("student") == seen:
                if _saved("lab", "tests") != kit:
                    runner.close()
                    os.execv(sys.executable, [sys.executable, "-m", "lab", "watch"])
                time.sleep(LOOK_S)
            before, seen = seen, _saved("student")
            files = sorted(file for file in {*before, *seen} if before.get(file) != seen.get(file))


def _settled(*folders: str) -> dict[str, tuple[int, int]]:
    """What is saved, once nothing is being written: editors write in several steps."""
    now = _saved(*folders)
    while True:
        time.sleep(LOOK_S / 5)
        if (later := _saved(*folders)) == now:
            return now
        now = later


def _saved(*folders: str) -> dict[str, tuple[int, int]]:
    """{file: (when it was written, bytes)} of all Python files."""
    found = {}
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            with contextlib.suppress(OSError):  # gone meanwhile: editors rename
                about = file.stat()
                found[file.relative_to(ROOT).as_posix()] = (about.st_mtime_ns, about.st_size)
    return found
