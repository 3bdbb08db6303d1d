"""What data parallelism costs, on paper: when each message leaves, when it arrives, and how long the step is."""

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
    raise NotImplementedError("ddp.accounting: Seconds that a ring all-reduce of `size` bytes takes over `world` ranks")


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
    raise NotImplementedError(
        "ddp.accounting: The time of one step of a model whose parameters have these sizes, in the order that forward …"
    )


def best_bucket_bytes(parameter_bytes: Sequence[int], world: int, link: Link, *, backward_s: float) -> int:
    """The bucket_bytes with which a step of `accounting(variant="bucketed")` is shortest; of several the smallest.

    At least 1. Buckets differ only where bucket_bytes passes the size of some parameters that follow each other, so
    that no other sizes need be tried. Steps that differ by less than 1e-9 of the shortest count as equal.
    """
    raise NotImplementedError(
        'ddp.accounting: The bucket_bytes with which a step of `accounting(variant="bucketed")` is shortest'
    )


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
    raise NotImplementedError("ddp.accounting: From where on data parallelism waits for the network")
