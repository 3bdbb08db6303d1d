"""The trace of one rank, recorded outside its process. A test judges its values first, then the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..ranks.ledger import Row
    from ..ranks.rank_status import Gate

# Measured on torch 2.13.0 (CPU), 2 cores, 12 runs of each probe. The process of an empty probe grows by 3 to 7 MiB. The
# process of a tiny computation grows by 22 to 30 MiB, because torch's code is read in page by page. Two runs of one
# probe differ by 2 to 4 MiB.
START_BYTES = 36 << 20  # upper bound for the growth by a tiny computation
NOISE_BYTES = 8 << 20  # upper bound for the difference of two runs; tests forbid at least four times as much


@dataclass(frozen=True)
class Trace:
    """One rank of one probe. The rank reports `values` and when its waits began; the rest is recorded outside."""

    values: Any  # what the probe returned
    peak_bytes: int  # growth of the process above its size at the fork, by the kernel; -1: not known
    seconds: float  # from the fork to the last answer of all ranks
    messages: Sequence[Row] = ()  # the rank's messages, in the order in which it issued them
    payloads: Sequence[torch.Tensor | None] = ()  # of each message; None if it was too large to keep
    gates: Sequence[Gate] = ()  # gates that the rank requested, in order
    stalls: Sequence[Row] = ()  # messages for which the rank waited while the switch delayed the answer
    rounds: int = 0  # if the switch delivers by rounds: number of rounds, the longest chain of messages
    files: Mapping[str, bytes] = field(default_factory=dict)  # content of the ranks' folder at the end

    def cut(self, names: Sequence[str]) -> list[list[dict]]:
        """Messages between each of these gates and the next. Raises AssertionError if the rank requested others."""
        requested = [gate.name for gate in self.gates]
        assert requested == [*names], f"expected to see {', '.join(names)}, saw {', '.join(requested) or 'nothing'}"
        ends = [*(gate.issued for gate in self.gates[1:]), len(self.messages)][: len(requested)]
        return [
            [row.plain() for row in self.messages[gate.issued : end]]
            for gate, end in zip(self.gates, ends, strict=True)
        ]

    def grew(self, small: Trace) -> int:
        """Bytes by which the process grew more than in `small`, the same probe on tiny inputs; -1: not known.

        At most START_BYTES of the small run count, so a solution gains nothing if it wastes memory there.
        """
        if min(self.peak_bytes, small.peak_bytes) < 0:
            return -1
        return max(0, self.peak_bytes - min(small.peak_bytes, START_BYTES))


def sends(
    rows: Sequence[dict], want: Sequence, label: str, cause: str = "", fields: Sequence[str] = ("op", "elements")
) -> None:
    """Assert that these messages, from `Trace.cut`, are the expected ones, in order. Compares only `fields`."""
    sent = [[row[field] for field in fields] for row in rows]
    assert sent == [[*each] for each in want], (
        f"{label}: sent {sent or 'nothing'}, expected {[[*each] for each in want] or 'nothing'}{cause and f': {cause}'}"
    )
