"""The cost of communication: seconds and bytes of every collective, from latency and bandwidth alone.

The link, the accounting exercises and the planner all use these functions, so they agree.
"""

import math
from dataclasses import dataclass


def ring_cost(op: str, bytes: float, world: int, alpha: float, beta: float) -> float:
    """Seconds that `op` takes over `world` ranks, on links with a latency of alpha seconds and beta seconds per byte.

    `bytes` is the payload, as in a row of the ledger. That is the size of a rank's input, except for reduce_scatter and
    scatter: there it is the size of a rank's output. With W ranks and a payload of n bytes:

        all_reduce       2(W − 1) · (α + n/W · β)   a ring; n: the tensor
        reduce_scatter   (W − 1) · (α + n · β)      a ring; n: the output of each rank, 1/W of its input
        all_gather       (W − 1) · (α + n · β)      a ring; n: the input of each rank
        all_to_all       (W − 1) · (α + n/W · β)    W − 1 rounds; n: the input of a rank, including the part it keeps
        broadcast        ⌈log₂ W⌉ · (α + n · β)     a binomial tree, not pipelined; n: the tensor
        reduce           ⌈log₂ W⌉ · (α + n · β)     the same tree, upwards
        scatter, gather  (W − 1) · (α + n · β)      the root sends or receives part by part; n: one part
        send, recv       α + n · β                  both ends of one message, so count it once
        barrier          ⌈log₂ W⌉ · α

    Example: an all_reduce of 1 MB over 4 ranks with 1 ms and 100 MB/s takes 6 · (1 ms + 0.25 MB / 100 MB/s) = 21 ms.
    With W = 1 a collective costs nothing. Raises ValueError for an unknown op. Sources: Thakur, Rabenseifner and Gropp
    2005; for all_reduce Patarasuk and Yuan 2009.
    """
    steps, step_bytes = _steps(op, bytes, world)
    return steps * (alpha + step_bytes * beta)


def sent_bytes(op: str, bytes: float, world: int) -> float:
    """Return the bytes that the busiest sender sends. `bytes` and the algorithms are those of `ring_cost`.

    In a ring all ranks send the same number of bytes: in an all_reduce of 1 MB over 4 ranks, each sends 2 · 3/4 MB =
    1.5 MB. The root of a broadcast sends the tensor ⌈log₂ W⌉ times; the root of a scatter sends W − 1 parts. In reduce
    and gather, every other rank sends once. A recv and a barrier count as 0.
    """
    steps, step_bytes = _steps(op, bytes, world)
    if op == "recv":
        return 0.0
    return step_bytes * (min(steps, 1) if op in ("reduce", "gather") else steps)


def _steps(op: str, bytes: float, world: int) -> tuple[int, float]:
    """Return (number of messages in sequence, bytes per message)."""
    if world < 1 or bytes < 0:
        raise ValueError(f"expected world >= 1 and bytes >= 0, got {world} and {bytes}")
    hops, doublings = world - 1, (world - 1).bit_length()  # doublings is ⌈log₂ W⌉
    steps: dict[str, tuple[int, float]] = {
        "all_reduce": (2 * hops, bytes / world),
        "reduce_scatter": (hops, bytes),
        "all_gather": (hops, bytes),
        "all_to_all": (hops, bytes / world),
        "broadcast": (doublings, bytes),
        "reduce": (doublings, bytes),
        "scatter": (hops, bytes),
        "gather": (hops, bytes),
        "send": (1, bytes),
        "recv": (1, bytes),
        "barrier": (doublings, 0),
    }
    if op not in steps:
        raise ValueError(f"expected an op among {', '.join(steps)}, got {op!r}")
    return steps[op]


@dataclass(frozen=True)
class Link:
    """A rank's connection to the other ranks: latency in seconds, bandwidth in bytes per second.

    On Link(alpha_s=1e-3, bytes_per_s=100e6), a message of 1 MB takes 1 ms + 10 ms.
    """

    alpha_s: float
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not _number(self.alpha_s) or not 0 <= self.alpha_s < math.inf:
            raise ValueError(f"alpha_s: expected a latency in seconds, 0 or more, got {self.alpha_s!r}")
        if not _number(self.bytes_per_s) or not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected a bandwidth above 0, got {self.bytes_per_s!r}")

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 1 / self.bytes_per_s

    @property
    def free(self) -> bool:
        """Whether messages take no time."""
        return self.alpha_s == self.beta == 0

    def cost_s(self, op: str, bytes: float, world: int) -> float:
        """Return the seconds of `ring_cost` on links like this one."""
        return ring_cost(op, bytes, world, self.alpha_s, self.beta)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
