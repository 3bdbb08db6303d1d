"""What can be seen of a probe from outside of its box, beside what its instruments told: where they part is a flag.

The instruments run in the student's process, so what they tell may be a story (lab/world/witness.py says what of it is
refused at once). What the kernel counts of the box is none: bytes on its own loopback, memory of all its processes and
files; nor is the zygote's clock, which the code under test cannot reach. Each bound was measured on the reference, the
variants and the stand-ins, with busy cores. What is smaller than a bound is not seen. A flag never changes a grade:
what is wrong fails by its test. But a race that was won while an instrument is contradicted decides nothing: it is
inconclusive, as on cores too busy to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lab import forbidden
from lab.assignment import default
from lab.runner import Observed
from lab.world.board import readable

from . import cs336
from .graded import Flag

HEADERS = 66  # bytes of Ethernet, IP and TCP headers of a packet on the loopback
SEGMENT = 64 << 10  # bytes of the largest one
MESSAGE = 400  # bytes that Gloo adds to a collective for each rank and peer, at most
RANK = 36 << 20  # bytes by which a child grows that computes next to nothing, at most; 18 to 24 MiB are usual


def of_probe(observed: Observed) -> Iterator[Flag]:
    """Flags for one probe, at most one a witness."""
    witnesses = {
        "ledger and loopback disagree": _loopback,
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


def of_source(root: Path, ids: tuple[str, ...], fork: bool = False) -> Iterator[Flag]:
    """Flags for what the source of an exercise does to reach past what it is given, as far as it can be read.

    Of a CS336 fork: its own source, for in the exercises' files is our bridge.
    """
    files = cs336.reached(root) if fork else [default().exercise(id).file for id in ids]
    seen = set()
    for where, file in zip(files if fork else ids, files, strict=True):
        for line in forbidden.reaches(root, file):
            if line not in seen:
                seen.add(line)
                yield Flag("reaches past what it is given", f"{where}: {line}")


# Bytes that Gloo puts on the wire for one rank's part in a collective over w ranks, in units of its payload; measured.
_ON_THE_WIRE = {
    "all_reduce": lambda w: 2 * (w - 1) / w, "broadcast": lambda w: (w - 1) / w, "reduce": lambda w: 1 - 1 / w**2,
    "all_gather": lambda w: w - 1, "reduce_scatter": lambda w: 2 * (w - 1), "all_to_all": lambda w: 1.0,
    "gather": lambda w: (w - 1) / w, "scatter": lambda w: (w - 1) / w, "send": lambda w: 1.0,
}  # fmt: skip


def on_the_wire(rows: list[list]) -> tuple[float, float]:
    """(payload, the most with what Gloo adds) in bytes that these rows, of all ranks, put on the loopback.

    An all_to_all may keep any part of its payload to itself, so it has none that is certain.
    """
    sure = most = 0.0
    for _, op, bytes, _, _, group, *_ in rows:
        others = len(group) - 1
        if others > 0 and op != "recv":
            payload = bytes * _ON_THE_WIRE.get(op, lambda w: 0.0)(len(group))
            sure += 0.0 if op == "all_to_all" else payload
            most += payload + MESSAGE * others
    return sure, most


def _loopback(observed: Observed) -> str:
    if len(observed.ranks) < 2 or "loopback_bytes" not in observed.readings:
        return ""
    carried = observed.readings["loopback_bytes"] - HEADERS * observed.readings["loopback_packets"]
    sure, most = on_the_wire([row for account in observed.ranks for row in account.rows.values()])
    again = SEGMENT * observed.readings.get("loopback_resent", 0)
    if sure / 2 - (64 << 10) <= carried <= 1.05 * most + (4 << 10) * len(observed.ranks) + again:
        return ""
    return (
        f"the loopback carried {readable(max(0, carried))} beside headers, by the ledger it should be "
        f"{readable(round(sure))} to {readable(round(most))}"
    )


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
