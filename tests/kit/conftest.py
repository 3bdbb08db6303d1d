"""Fixtures of the kit's own tests."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.harness.runner import Executor, Runner
from lab.measure import device

from .boxes import boxed, kit  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One runner for all files, since its process takes seconds to start."""
    r = Runner(Executor(tmp_path_factory.mktemp("impl")))
    yield r
    r.close()


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, warm: Runner, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs probes against the file's IMPL, or an empty folder until a test sets another executor."""
    warm.executor = Executor(getattr(request.module, "IMPL", None) or tmp_path_factory.mktemp("impl"))
    warm.forget()
    warm.allowed = ()
    warm.limit_s = math.inf  # another file may have used it up
    return warm


@pytest.fixture
def solution(runner: Runner, tmp_path: Path) -> Callable[..., Runner]:
    """`solution(code)` returns the runner with an implementation of this single file."""

    def write(code: str, file: str = "ddp/naive.py") -> Runner:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code)
        runner.executor, runner.limit_s = Executor(tmp_path), math.inf
        runner.forget()
        return runner

    return write


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`said(main, *arguments)` runs a command line in this process and returns its exit code and output."""

    def run(main: Callable[[], None], *arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["it", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        printed = capsys.readouterr()
        return int(str(code)), printed.out + printed.err

    return run


@pytest.fixture
def gpu() -> Iterator[device.SimulatedGPU]:
    with device.SimulatedGPU() as gpu:
        yield gpu
