"""Fixtures of the kit's own tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from lab.harness.runner import Executor, Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs probes against an implementation that is empty until a test points the executor elsewhere."""
    r = Runner(Executor(tmp_path_factory.mktemp("impl")))
    yield r
    r.close()


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
