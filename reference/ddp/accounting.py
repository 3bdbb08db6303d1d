"""The cost of data parallelism on paper: when each message leaves and arrives, and how long the step takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Link:
    """The cost of one message: a latency of alpha_s seconds, plus 1 / bytes_per_s seconds per byte."""

    alpha_s: float
    bytes_per_s: float


@provided
@dataclass(frozen=True)
class StepTime:
    """One step of data parallelism. Times are in seconds.

    all_reduces: number of all-reduces. communication_s: sum of their durations. exposed_s: part of the communication
    that backward does not hide. step_s: duration of the step. bound_s: lower bound for a step with these messages.
    """

    all_reduces: int
    communication_s: float
    exposed_s: float
    step_s: float
    bound_s: float


@provided
@dataclass(frozen=True)
class Limits:
    """Where backward just hides communication: fewest samples per rank, lowest bandwidth (bytes/s), most ranks."""

    samples: int
    bytes_per_s: float
    world: int


def all_reduce_s(size: float, world: int, link: Link) -> float:
    """Return the seconds that a ring all-reduce of `size` bytes takes over `world` ranks.

    The ring sends 2(W − 1) messages one after the other, each of size / W bytes, so the time is
    2(W − 1)·(α + size / W · β), with β = 1 / bytes_per_s. It is 0 for one rank.
    Example: 1 MB over 4 ranks at 100 µs and 1 GB/s takes 6 · (100 µs + 250 µs) = 2.1 ms.
    Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
    """
    return 2 * (world - 1) * (link.alpha_s + size / world / link.bytes_per_s)


def accounting(
    parameter_bytes: Sequence[int], world: int, link: Link, *,
    variant: Literal["naive", "flat", "overlapped", "bucketed"], backward_s: float, forward_s: float = 0.0,
    optimizer_s: float = 0.0, bucket_bytes: int = 25 << 20,
) -> StepTime:  # fmt: skip
    """Return the time of one step. parameter_bytes: sizes of the parameters, in the order in which forward uses them.

    Backward visits the parameters in reverse order. It spends on each a part of backward_s in proportion to its bytes,
    and then the gradient is ready. The network carries one all-reduce at a time, in the order of issue, and does not
    slow backward down. The optimizer starts when backward and the last all-reduce have ended. All-reduces are issued

    - naive: one per parameter, when backward has ended;
    - flat: one in total, when backward has ended;
    - overlapped: one per parameter, when its gradient is ready;
    - bucketed: one per bucket, when the last gradient in it is ready. Buckets hold at most `bucket_bytes`, and are
      filled in reverse order of use; a larger parameter gets a bucket of its own.

    bound_s is forward + max(backward, first issue + communication, last issue + last all-reduce) + optimizer.
    Example: two parameters of 1 MB, 4 ranks, 100 µs, 1 GB/s, 6 ms of backward, overlapped. The all-reduces are issued
    at 3 and 6 ms and take 2.1 ms each, so communication is 4.2 ms, exposed communication 2.1 ms, the step 8.1 ms.
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
    network_free = 0.0
    for start, cost in zip(issued, costs, strict=True):
        network_free = max(network_free, start) + cost
    backward_or_network = max(backward_s, network_free)
    bound = max(backward_s, issued[0] + sum(costs), issued[-1] + costs[-1])
    return StepTime(
        all_reduces=len(sizes),
        communication_s=sum(costs),
        exposed_s=backward_or_network - backward_s,
        step_s=forward_s + backward_or_network + optimizer_s,
        bound_s=forward_s + bound + optimizer_s,
    )


def best_bucket_bytes(parameter_bytes: Sequence[int], world: int, link: Link, *, backward_s: float) -> int:
    """Return the bucket_bytes for which `accounting(variant="bucketed")` gives the shortest step; the smallest of ties.

    The result is at least 1. Buckets change only where bucket_bytes passes the total size of some consecutive
    parameters, so only those sizes need to be tried. Steps within 1e-9 of the shortest, relatively, count as ties.
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
    """Return the limits at which one all-reduce of all gradients takes exactly as long as backward.

    backward_s: time of backward for `samples` samples on one rank; it is proportional to their number. Each limit
    leaves the other quantities as given:

    - samples: fewest samples per rank, at least 1;
    - bytes_per_s: lowest bandwidth of the link; infinite if its latencies alone outlast backward, 0 for one rank;
    - world: most ranks W that may divide the global batch of samples · world, each with samples · world / W samples,
      whole or not. It solves 2(W − 1)·(α + S / W · β) = T₁ / W, a quadratic equation in W, where T₁ is the time of
      backward for the global batch on one rank.
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
    most_ranks = math.floor(2 * c / (b + math.sqrt(b * b + 4 * link.alpha_s * c)))
    return Limits(fewest, slowest, most_ranks)


def _buckets(sizes: list[int], limit: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for size in sizes:
        if buckets and sum(buckets[-1]) + size <= limit:
            buckets[-1].append(size)
        else:
            buckets.append([size])
    return buckets
