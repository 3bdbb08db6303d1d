"""What runs in the ranks of `benchmarks.ddp`: a step of each wrapper in turn, and the parts of one measured alone."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Config, Transformer

CONFIG = Config(layers=6, width=512, heads=8, kv_heads=8, hidden=1408, vocabulary=512, context=64)  # 20 M parameters
MIB = 1 << 20
VARIANTS = {
    "naive": lambda impl, m: impl.ddp.naive.NaiveDDP(m),
    "flat": lambda impl, m: impl.ddp.flat.FlatDDP(m),
    "overlapped": lambda impl, m: impl.ddp.overlapped.OverlappedDDP(m),
    "bucketed, 25 MiB": lambda impl, m: impl.ddp.bucketed.BucketedDDP(m, 25 * MIB),
    "bucketed, 5 MiB": lambda impl, m: impl.ddp.bucketed.BucketedDDP(m, 5 * MIB),
    "torch, 25 MiB": lambda impl, m: nn.parallel.DistributedDataParallel(m),
    "torch, 5 MiB": lambda impl, m: nn.parallel.DistributedDataParallel(m, bucket_cap_mb=5),
    "torch, 5 MiB, views": lambda impl, m: nn.parallel.DistributedDataParallel(
        m, bucket_cap_mb=5, gradient_as_bucket_view=True
    ),
}


def steps(impl: Any, rounds: int) -> dict:
    """Seconds of each variant's steps, in turn, and this rank's lower bound."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Transformer(CONFIG)
    torch.manual_seed(1 + rank)
    tokens, targets = torch.randint(CONFIG.vocabulary, (2, 1, 32)).unbind()
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    wrapped = {name: make(impl, _copy(plain)) for name, make in VARIANTS.items()}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=1e-3) for name, m in wrapped.items()}
    for i in range(rounds + 3):
        for name, model in wrapped.items():
            optimizers[name].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            _loss(model, tokens, targets).backward()
            if hasattr(model, "finish_gradient_synchronization"):
                model.finish_gradient_synchronization()
            optimizers[name].step()
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    return {"times": times, "bound": lower_bound(plain, tokens, targets, rounds)}


def _copy(module: nn.Module) -> nn.Module:
    copy = Transformer(CONFIG)
    copy.load_state_dict(module.state_dict())
    return copy


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())


def lower_bound(model: nn.Module, tokens: Tensor, targets: Tensor, rounds: int) -> float:
    """Seconds that a step takes at least: what must follow each other, each part measured alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    buckets = _bucket_elements(model, 5 * MIB)
    buffers = [torch.ones(n) for n in buckets]
    ready = buckets[0] / sum(buckets)  # share of backward until the first bucket is full, by elements
    parts: dict[str, list[float]] = {n: [] for n in ("forward", "backward", "optimizer", "all", "last")}
    for i in range(rounds + 3):
        optimizer.zero_grad()
        marks = [time.perf_counter()]
        loss = _loss(model, tokens, targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        dist.barrier()
        marks.append(time.perf_counter())
        works = [dist.all_reduce(b, async_op=True) for b in buffers]
        for work in works:
            work.wait()
        marks.append(time.perf_counter())
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(buffers[-1])
        last = time.perf_counter() - begun
        if i >= 3:
            of = [marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2], marks[5] - marks[4], last]
            for values, value in zip(parts.values(), of, strict=True):
                values.append(value)
    t = {name: statistics.median(values) for name, values in parts.items()}
    return (
        t["forward"] + max(t["backward"], ready * t["backward"] + t["all"], t["backward"] + t["last"]) + t["optimizer"]
    )


def _bucket_elements(model: nn.Module, limit: int) -> list[int]:
    """Elements of each bucket of at most `limit` bytes, in reverse order of the parameters."""
    elements = [0]
    for parameter in reversed(list(model.parameters())):
        if elements[-1] and 4 * (elements[-1] + parameter.numel()) > limit:
            elements.append(0)
        elements[-1] += parameter.numel()
    return elements
