"""Probes of `benchmarks.ddp`: steps of each wrapper in turn, and the parts of a step measured alone."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .side_by_side import WARM_UP, Step, backward, loss_of, model, time_in_turn, tokens_of_rank

MIB = 1 << 20
VARIANTS = {
    "naive": lambda impl, m: impl.ddp.naive.NaiveDDP(m),
    "flat": lambda impl, m: impl.ddp.flat.FlatDDP(m),
    "overlapped": lambda impl, m: impl.ddp.overlapped.OverlappedDDP(m),
    "bucketed, 25 MiB": lambda impl, m: impl.ddp.bucketed.BucketedDDP(m, 25 * MIB),
    "bucketed, 5 MiB": lambda impl, m: impl.ddp.bucketed.BucketedDDP(m, 5 * MIB),
    "torch, 25 MiB": lambda impl, m: nn.parallel.DistributedDataParallel(m),
    "torch, 5 MiB": lambda impl, m: nn.parallel.DistributedDataParallel(m, bucket_cap_mb=5),
    "torch, 25 MiB, views": lambda impl, m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True),
    "torch, 5 MiB, views": lambda impl, m: nn.parallel.DistributedDataParallel(
        m, bucket_cap_mb=5, gradient_as_bucket_view=True
    ),
}


def steps(impl: Any, rounds: int) -> dict:
    """Return {"times": seconds of each variant's steps, taken in turn; "bound": this rank's lower bound}."""
    tokens, targets = tokens_of_rank()
    variants = {name: training_step(make(impl, model()), tokens, targets) for name, make in VARIANTS.items()}
    return {"times": time_in_turn(variants, rounds), "bound": lower_bound(model(), tokens, targets, rounds)}


def training_step(wrapped: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """Return a function that runs forward, backward and SGD."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        backward(wrapped, tokens, targets)
        optimizer.step()

    return step


def lower_bound(plain: nn.Module, tokens: Tensor, targets: Tensor, rounds: int) -> float:
    """Lower bound of a step's seconds: the critical path through its parts, each measured alone."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    buckets = _bucket_elements(plain, 5 * MIB)
    buffers = [torch.ones(n) for n in buckets]
    ready_share = buckets[0] / sum(buckets)  # estimated share of backward until the first bucket is full
    times: dict[str, list[float]] = defaultdict(list)

    def timed(part: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times[part].append(time.perf_counter() - start)
        return result

    def all_reduces() -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()

    for _ in range(rounds + WARM_UP):
        optimizer.zero_grad()
        loss = timed("forward", lambda: loss_of(plain(tokens), targets))
        timed("backward", loss.backward)
        timed("optimizer", optimizer.step)
        dist.barrier()
        timed("all", all_reduces)
        dist.barrier()
        timed("last", lambda: dist.all_reduce(buffers[-1]))
    t = {part: statistics.median(samples[WARM_UP:]) for part, samples in times.items()}
    overlapped = max(t["backward"], ready_share * t["backward"] + t["all"], t["backward"] + t["last"])
    return t["forward"] + overlapped + t["optimizer"]


def _bucket_elements(plain: nn.Module, limit: int) -> list[int]:
    """Elements of each bucket of at most `limit` bytes, in reverse order of the parameters."""
    elements = [0]
    for parameter in reversed(list(plain.parameters())):
        if elements[-1] and 4 * (elements[-1] + parameter.numel()) > limit:
            elements.append(0)
        elements[-1] += parameter.numel()
    return elements
