"""Helpers to measure a process's memory as the operating system sees it, for any library and thread."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

import torch

from . import clock


def weigh(ballast_bytes: int) -> None:
    """Allocate and free `ballast_bytes`, so that the process's memory peak is what it holds now, plus `ballast_bytes`.

    First returns free memory to the system. ballast_bytes: more than all temporary memory so far, because a larger
    earlier peak would hide the current memory.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    torch.ones(ballast_bytes // 8, dtype=torch.float64)


def lowest_bytes(measure: Callable[[], int], limit: float = -1.0, patience_s: float = 0.12) -> int:
    """Call `measure` until it returns at most `limit` bytes, or `patience_s` is over. Return the minimum.

    Gloo's threads free a message some time after its wait has returned. On busy cores this takes longer.
    """
    deadline, lowest = clock.monotonic() + patience_s, measure()
    while lowest > limit and clock.monotonic() < deadline:
        clock.sleep(0.003)
        lowest = min(lowest, measure())
    return lowest


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Make torch.empty return NaN inside the block, instead of arbitrary old values."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
