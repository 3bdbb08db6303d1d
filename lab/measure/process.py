"""Memory as the operating system sees it: by whatever library, in whatever thread; and memory that nobody wrote."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch


def grown(call: Callable[[], object]) -> int:
    """Bytes by which the process grew at most while `call` ran; -1 where that cannot be known: Linux alone tells.

    Run it on something small first, or what is loaded once is counted too.
    """
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the highest that the resident memory was is forgotten
    except OSError:
        return -1
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty gives NaN, not what happens to lie there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
