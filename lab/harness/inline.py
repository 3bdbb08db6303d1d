"""`pytest --inline`: probes run in pytest itself, so that a debugger stops in the student's code."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from ..ranks import child
from ..solution import impl as implementation
from ..solution import wire
from .runner import ProbeFailed, Runner
from .trace import Trace


class InlineRunner(Runner):
    """Runs single-rank, real, interpreted probes. Skips a test that requests other options, and lists them."""

    def trace(self, probe: Callable[..., Any], *args: Any, **options: Any) -> list[Trace]:
        requested = {k: v for k, v in options.items() if k in ("world", "device", "triton", "link") and v is not None}
        refused = [f"{k}={v!r}" for k, v in requested.items() if v not in ("real", "interpret")]
        if refused:
            pytest.skip(f"--inline runs single-rank, real, interpreted probes; this one asks for {', '.join(refused)}")
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # No Watch here: it would outlive the probe. The source is still searched for forbidden names.
        job = self.job(probe, timeout=options.get("timeout"), replace=options.get("replace"))
        try:
            value = child.run(job, wire.unpack(wire.pack(args)), 0, -1)
            return [Trace(wire.unpack(wire.pack(value)), -1, 0.0)]
        except NotImplementedError as error:
            raise ProbeFailed("unwritten", str(error)) from error
        finally:
            implementation.unload()
