"""What data parallelism costs, on paper: when each message leaves, when it arrives, and how long the step is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Link:
    """What a message costs: alpha_s seconds, whatever its size, and 1 / bytes_per_s for each byte."""

    alpha_s: float
    bytes_per_s: float


@provided
@dataclass(frozen=True)
class StepTime:
    """A step of data parallelism; seconds.

    all_reduces: how many are issued. communication_s: of all of them, one after the other. exposed_s: what of it
    backward does not hide. step_s: the step. bound_s: the least that a step with these messages can take.
    """

    all_reduces: int
    communication_s: float
    exposed_s: float
    step_s: float
    bound_s: float


@provided
@dataclass(frozen=True)
class Limits:
    """Where communication is just hidden: samples a rank at least, bytes/s at least, ranks at most."""

    samples: int
    bytes_per_s: float
    world: int


def all_reduce_s(size: float, world: int, link: Link) -> float:
    """Seconds that a ring all-reduce of `size` bytes takes over `world` ranks.

    2(W − 1) messages after each other, each of size / W bytes: 2(W − 1)·(α + size / W · β), with β = 1 / bytes_per_s;
    0 for one rank. 1 MB over 4 ranks at 100 µs and 1 GB/s: 6 · (100 µs + 250 µs) = 2.1 ms.
    Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
    """
    return 2 * (world - 1) * (link.alpha_s + size / world / link.bytes_per_s)


def accounting(
    parameter_bytes: Sequence[int], world: int, link: Link, *,
    variant: Literal["naive", "flat", "overlapped", "bucketed"], backward_s: float, forward_s: float = 0.0,
    optimizer_s: float = 0.0, bucket_bytes: int = 25 << 20,
) -> StepTime:  # fmt: skip
    """The time of one step of a model whose parameters have these sizes, in the order that forward uses them.

    Backward goes through them in reverse, and spends on each a share of backward_s that is its share of the bytes; a
    gradient is ready when backward has gone through its parameter. The network carries one all-reduce at a time, in
    the order of issue, and does not slow backward down. The optimizer begins when backward and the last all-reduce have
    ended. An all-reduce is issued

    - naive: for each parameter, when backward has ended;
    - flat: one for all, when backward has ended;
    - overlapped: for each parameter, when its gradient is ready;
    - bucketed: for each bucket, when the last gradient in it is ready. Buckets are filled in reverse order of use with
      at most `bucket_bytes`; a larger parameter has one of its own.

    bound_s is forward + max(backward, first issue + communication, last issue + last all-reduce) + optimizer: no step
    with these messages is shorter, most are no longer. Two parameters of 1 MB, 4 ranks, 100 µs, 1 GB/s, 6 ms of
    backward, overlapped: issued at 3 and 6 ms, 2.1 ms each: communication 4.2 ms, exposed 2.1 ms, step 8.1 ms.
    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.
    """
    backwards = list(reversed(parameter_bytes))
    messages = {
        "naive": [[size] for size in backwards],
        "flat": [backwards],
        "overlapped": [[size] for size in backwards],
        "bucketed": _buckets(backwards, bucket_bytes),
    }[variant]
    sizes = [sum(message) for message in messages]
    issued, reached = [], 0
    for size in sizes:
        reached += size
        share = reached / sum(sizes) if variant in ("overlapped", "bucketed") else 1.0
        issued.append(share * backward_s)
    costs = [all_reduce_s(size, world, link) for size in sizes]
    ended = 0.0
    for start, cost in zip(issued, costs, strict=True):
        ended = max(ended, start) + cost
    backward_or_network = max(backward_s, ended)
    bound = max(backward_s, issued[0] + sum(costs), issued[-1] + costs[-1])
    return StepTime(
        all_reduces=len(sizes),
        communication_s=sum(costs),
        exposed_s=backward_or_network - backward_s,
        step_s=forward_s + backward_or_network + optimizer_s,
        bound_s=forward_s + bound + optimizer_s,
    )


def best_bucket_bytes(parameter_bytes: Sequence[int], world: int, link: Link, *, backward_s: float) -> int:
    """The bucket_bytes with which a step of `accounting(variant="bucketed")` is shortest; of several the smallest.

    At least 1. Buckets differ only where bucket_bytes passes the size of some parameters that follow each other, so
    that no other sizes need be tried. Steps that differ by less than 1e-9 of the shortest count as equal.
    """
    sums = {
        sum(parameter_bytes[i:j]) for i in range(len(parameter_bytes)) for j in range(i + 2, len(parameter_bytes) + 1)
    }
    steps = {
        size: accounting(
            parameter_bytes, world, link, variant="bucketed", backward_s=backward_s, bucket_bytes=size
        ).step_s
        for size in sorted({1, *sums})
    }
    shortest = min(steps.values())
    return next(size for size, step in steps.items() if step <= shortest * (1 + 1e-9))


def limits(total_bytes: int, world: int, link: Link, *, backward_s: float, samples: int) -> Limits:
    """From where on data parallelism waits for the network: where one all-reduce of all gradients outlasts backward.

    backward_s: of `samples` samples on one rank; the time is proportional to their number. Each limit is for the others
    as given:

    - samples: the fewest a rank must have, at least 1;
    - bytes_per_s: the least that the link must carry; infinite where its latencies alone outlast backward, 0 for one
      rank;
    - world: the most ranks that may share the global batch of samples · world, W ranks having samples · world / W each,
      whole or not. It solves 2(W − 1)·(α + S / W · β) = T₁ / W, with T₁ the backward of the global batch on one rank: a
      quadratic equation in W.
    """
    latency_s = 2 * (world - 1) * link.alpha_s
    communication_s = all_reduce_s(total_bytes, world, link)
    fewest = max(1, math.ceil(communication_s / (backward_s / samples)))

    sent = 2 * (world - 1) / world * total_bytes
    left_s = backward_s - latency_s
    slowest = 0.0 if world == 1 else sent / left_s if left_s > 0 else math.inf

    # α W² + b W − c = 0; written so that it holds for α = 0 too.
    transfer_s = total_bytes / link.bytes_per_s
    b, c = transfer_s - link.alpha_s, transfer_s + backward_s * world / 2
    most = math.floor(2 * c / (b + math.sqrt(b * b + 4 * link.alpha_s * c)))
    return Limits(fewest, slowest, most)


def _buckets(sizes: list[int], limit: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for size in sizes:
        if buckets and sum(buckets[-1]) + size <= limit:
            buckets[-1].append(size)
        else:
            buckets.append([size])
    return buckets
