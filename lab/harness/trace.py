"""The trace of one rank, recorded outside of its process. A test judges its values first, then the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..ranks.ledger import Row
    from ..ranks.rank_status import Gate

# Measured on torch 2.13.0 (CPU), 2 cores, 12 runs of each probe: an empty one grows by 3 to 7 MiB, one that computes
# next to nothing by 22 to 30 MiB (code of torch is read in page by page), and two runs of one probe differ by 2 to 4.
START_BYTES = 36 << 20  # by which a process grows at most that computes next to nothing
NOISE_BYTES = 8 << 20  # by which two runs of one probe differ at most; what is forbidden is four times as large


@dataclass(frozen=True)
class Trace:
    """One rank of one probe. Everything but `values` comes from outside of its process: the switch and the kernel."""

    values: Any  # what the probe returned
    peak_bytes: int  # how far the process grew above its size at the fork, by the kernel's books; -1: not known
    seconds: float  # from the fork to the last answer of all ranks
    messages: Sequence[Row] = ()  # what the switch carried for it, in the order in which it was issued
    payloads: Sequence[torch.Tensor | None] = ()  # of each message; None where it was too large to be kept
    gates: Sequence[Gate] = ()  # that it asked, in order
    stood_still: Sequence[Row] = ()  # what it waited for while the switch kept the answer back

    def cut(self, names: Sequence[str]) -> list[list[dict]]:
        """What the switch carried after each of these gates, until the next. Raises AssertionError for other gates."""
        asked = [gate.name for gate in self.gates]
        assert asked == [*names], f"expected to see {', '.join(names)}, saw {', '.join(asked) or 'nothing'}"
        ends = [*(gate.issued for gate in self.gates[1:]), len(self.messages)][: len(asked)]
        return [
            [row.plain() for row in self.messages[gate.issued : end]]
            for gate, end in zip(self.gates, ends, strict=True)
        ]

    def grew(self, small: Trace) -> int:
        """How far it grew beyond a run of the same probe on next to nothing; -1: not known.

        A small run that was large for a purpose gains nothing: at most START_BYTES of it count.
        """
        if min(self.peak_bytes, small.peak_bytes) < 0:
            return -1
        return max(0, self.peak_bytes - min(small.peak_bytes, START_BYTES))


def sends(
    rows: Sequence[dict], want: Sequence, who: str, cause: str = "", fields: Sequence[str] = ("op", "elements")
) -> None:
    """Assert that these messages, as `Trace.cut` has them, are the wanted ones, in order, by some of their fields."""
    sent = [[row[field] for field in fields] for row in rows]
    assert sent == [[*each] for each in want], (
        f"{who}: sent {sent or 'nothing'}, expected {[[*each] for each in want] or 'nothing'}{cause and f': {cause}'}"
    )
