"""Probes for `benchmarks.overhead`: an empty one, and one that runs collectives."""

import time

import torch
import torch.distributed as dist


def nothing(impl) -> None:
    """Return at once, so that all its time is overhead."""


def all_reduces(impl, elements: int, times: int) -> float:
    """Mean seconds per all-reduce of `elements` float32 numbers, after one warm-up."""
    x = torch.ones(elements)
    dist.all_reduce(x)
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(x)
    return (time.perf_counter() - start) / times
