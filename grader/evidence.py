"""What can be seen of a probe from outside of its box, beside what its instruments told: where they part is a flag.

The switch carries all messages, so they need no second reading (lab/world/switch.py). Some instruments still measure
memory and seconds inside the graded process, which could forge them. It can forge neither the kernel's count for the
whole sandbox nor the zygote's clock. We measured each bound on the reference, the variants and the stand-ins, with busy
cores; a smaller difference raises no flag. A flag never changes a grade. A race won while an instrument is contradicted
is inconclusive, as on busy cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lab.runner import Observed
from lab.world.ledger import readable

from .graded import Flag

RANK = 36 << 20  # bytes by which a child grows that computes next to nothing, at most; 18 to 24 MiB are usual


def of_probe(observed: Observed) -> Iterator[Flag]:
    """Flags for one probe, at most one a witness."""
    witnesses = {
        "memory and its meter disagree": _memory,
        "clocks disagree": _clock,
    }
    for kind, witness in witnesses.items():
        if detail := witness(observed):
            yield Flag(kind, f"{observed.exercise}: {observed.probe}: {detail}")


def observer(flags: list[Flag]) -> Callable[[Observed], bool]:
    """For `Runner.observe`: adds each probe's flags to these, and says whether there were any."""

    def observe(observed: Observed) -> bool:
        found = list(of_probe(observed))
        flags.extend(found)
        return bool(found)

    return observe


def _memory(observed: Observed) -> str:
    """Where the probe metered its memory, the box grows by that, by a child, and by what it is called with."""
    told = [peak for account in observed.ranks for peak in account.peaks()]
    if not told or "memory_bytes" not in observed.readings:
        return ""
    grown = observed.readings["memory_bytes"]
    bound = len(observed.ranks) * (RANK + 3 * observed.asked_bytes) + 2 * sum(told)
    if grown <= bound:
        return ""
    return f"the box grew by {readable(grown)}, the meters told of {readable(sum(told))} in {len(observed.ranks)} ranks"


def _clock(observed: Observed) -> str:
    """Seconds that were taken inside, beside the zygote's between the lines that told of their start and end."""
    for rank, account in enumerate(observed.ranks):
        for which, pairs in account.took.items():
            inside, outside = (sum(seconds) for seconds in zip(*pairs, strict=True))
            if abs(inside - outside) > 0.15 * outside + 0.1 or inside > observed.seconds:
                return (
                    f"rank {rank} told of {inside:.3f} s for {'b' if which else 'a'}, in {len(pairs)} times; between "
                    f"its telling so {outside:.3f} s went by, in the whole probe {observed.seconds:.3f} s"
                )
    return ""
