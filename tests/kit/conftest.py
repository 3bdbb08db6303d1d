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
    """One process for all files: its start takes seconds."""
    r = Runner(Executor(tmp_path_factory.mktemp("impl")))
    yield r
    r.close()


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, warm: Runner, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs probes against the file's IMPL, or an empty one until a test points the executor elsewhere."""
    warm.executor = Executor(getattr(request.module, "IMPL", None) or tmp_path_factory.mktemp("impl"))
    warm.forget()
    warm.allowed = ()
    warm.limit_s = math.inf  # which another file may have spent
    return warm


@pytest.fixture
def solution(runner: Runner, tmp_path: Path) -> Callable[..., Runner]:
    """`solution(code)`: the runner, against an implementation that has this one file."""

    def write(code: str, file: str = "ddp/naive.py") -> Runner:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code)
        runner.executor, runner.limit_s = Executor(tmp_path), math.inf
        runner.forget()
        return runner

    return write


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`said(main, *arguments)`: exit code and output of a command line, in this process."""

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
