"""Probes that measure the machinery: what an empty one takes, and what a collective does."""

import time

import torch
import torch.distributed as dist


def nothing(impl) -> None:
    """Answer at once: all that it takes is overhead."""


def all_reduces(impl, elements: int, times: int) -> float:
    """Seconds an all-reduce of so many float32 takes, on average, after one that does not count."""
    x = torch.ones(elements)
    dist.all_reduce(x)
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(x)
    return (time.perf_counter() - start) / times
