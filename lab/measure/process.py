"""Memory as the operating system sees it, for any library and thread."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

import torch

from . import clock


def weigh(ballast_bytes: int) -> None:
    """Let the process be so much larger for a moment: its high-water mark then tells what it holds now, not then.

    ballast_bytes: more than all that was there for a moment only. Memory that is free is given back first.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    torch.ones(ballast_bytes // 8, dtype=torch.float64)


def settled(held: Callable[[], int], most: float = -1.0, patience_s: float = 0.12) -> int:
    """The least of several looks at bytes that are held; the last is when they are at most `most`, or patience ends.

    Gloo's threads let go of a message when they come to it: on busy cores, after whoever waited for it has gone on.
    """
    give_up, least = clock.monotonic() + patience_s, held()
    while least > most and clock.monotonic() < give_up:
        clock.sleep(0.003)
        least = min(least, held())
    return least


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
