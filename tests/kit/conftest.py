"""Fixtures of the kit's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.harness.runner import Executor, Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs probes against an implementation that is empty until a test points the executor elsewhere."""
    r = Runner(Executor(tmp_path_factory.mktemp("impl")))
    yield r
    r.close()
