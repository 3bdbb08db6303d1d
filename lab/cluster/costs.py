"""The cost of communication: seconds and bytes of every collective, from latency and bandwidth alone.

The link, the accounting exercises and the planner all ask here, so that they agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def ring_cost(op: str, bytes: float, world: int, alpha: float, beta: float) -> float:
    """Seconds that `op` takes over `world` ranks whose links have a latency of alpha s and take beta s a byte.

    `bytes` is the payload, as in a row of the ledger: the tensor that a rank hands in, but for reduce_scatter and
    scatter the part that it gets back. With W ranks and a payload of n bytes:

        all_reduce       2(W − 1) · (α + n/W · β)   a ring; n: the tensor
        reduce_scatter   (W − 1) · (α + n · β)      a ring; n: the part that each gets, a W-th of its tensor
        all_gather       (W − 1) · (α + n · β)      a ring; n: the part that each gives
        all_to_all       (W − 1) · (α + n/W · β)    in turns; n: all that a rank hands in, its own part too
        broadcast        ⌈log₂ W⌉ · (α + n · β)     a binomial tree, not pipelined; n: the tensor
        reduce           ⌈log₂ W⌉ · (α + n · β)     the same tree, upwards
        scatter, gather  (W − 1) · (α + n · β)      one after the other from or to the root; n: the part of each
        send, recv       α + n · β                  the same message, so not to be added
        barrier          ⌈log₂ W⌉ · α

    An all_reduce of 1 MB over 4 ranks, 1 ms, 100 MB/s: 6 · (1 ms + 0.25 MB / 100 MB/s) = 21 ms. Alone (W = 1) a
    collective costs nothing. Raises ValueError for an op it does not know. Sources: Thakur, Rabenseifner and Gropp
    2005; for all_reduce Patarasuk and Yuan 2009.
    """
    steps, step_bytes = _steps(op, bytes, world)
    return steps * (alpha + step_bytes * beta)


def sent_bytes(op: str, bytes: float, world: int) -> float:
    """Bytes that the rank which sends most sends; `bytes` and the algorithms are those of `ring_cost`.

    In a ring all ranks send as much: an all_reduce of 1 MB over 4 ranks sends 2 · 3/4 MB = 1.5 MB from each. The root
    of a broadcast tree sends ⌈log₂ W⌉ times, that of a scatter W − 1 times; in reduce and gather each other rank sends
    once. A recv and a barrier send nothing that counts.
    """
    steps, step_bytes = _steps(op, bytes, world)
    if op == "recv":
        return 0.0
    return step_bytes * (min(steps, 1) if op in ("reduce", "gather") else steps)


def _steps(op: str, bytes: float, world: int) -> tuple[int, float]:
    """(messages that follow each other, bytes of each)."""
    if world < 1 or bytes < 0:
        raise ValueError(f"expected world >= 1 and bytes >= 0, got {world} and {bytes}")
    around, doublings = world - 1, (world - 1).bit_length()  # the latter is ⌈log₂ W⌉
    steps: dict[str, tuple[int, float]] = {
        "all_reduce": (2 * around, bytes / world),
        "reduce_scatter": (around, bytes),
        "all_gather": (around, bytes),
        "all_to_all": (around, bytes / world),
        "broadcast": (doublings, bytes),
        "reduce": (doublings, bytes),
        "scatter": (around, bytes),
        "gather": (around, bytes),
        "send": (1, bytes),
        "recv": (1, bytes),
        "barrier": (doublings, 0),
    }
    if op not in steps:
        raise ValueError(f"expected an op among {', '.join(steps)}, got {op!r}")
    return steps[op]


@dataclass(frozen=True)
class Link:
    """What joins a rank to the others: seconds before a message's first byte is there, and bytes a second after it.

    Link(alpha_s=1e-3, bytes_per_s=100e6): a message of 1 MB takes 1 ms + 10 ms.
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
        """Seconds a byte."""
        return 1 / self.bytes_per_s

    @property
    def free(self) -> bool:
        """Whether all it carries costs nothing."""
        return self.alpha_s == self.beta == 0

    def cost_s(self, op: str, bytes: float, world: int) -> float:
        """`ring_cost` on links like this one."""
        return ring_cost(op, bytes, world, self.alpha_s, self.beta)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
