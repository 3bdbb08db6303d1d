"""What the instruments of a rank tell as it happens, on a pipe that only takes: what is told cannot be taken back.

The zygote reads the pipe, stamps each line with its own clock, and hands all of it out beside the answer. Outside,
`Account` compares the answer with it: storages that were made and then not counted, accesses of kernels
that are gone, seconds that are not those that were taken. An answer that does not agree with what was told on its way
is none: the probe fails as "forged". Messages need no such account: the switch carried them.

It proves that no number was moved after it was taken; that nobody replaced an instrument is for lab/world/watch.py to
see. It does not prove that numbers were right when they were taken: what goes past an instrument is not told, and code
that knows this page can tell a story of its own. For that there are readings from outside the box, of
memory and of the clock: grader/evidence.py.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from .ledger import readable

LIMIT = 16 << 20  # bytes that are kept of what one rank tells
LARGE = 256 << 10  # bytes from which on a storage is told of when it is made, and when it goes
MEMORY = ("peak_bytes", "largest_elements", "saved_bytes", "saved_largest_elements")

_fd = -1
_json = json.JSONEncoder(separators=(",", ":")).encode


def listen(fd: int) -> None:
    """From here on, what is told goes to this descriptor."""
    global _fd
    _fd = fd


def tell(what: str, *values: Any) -> None:
    """Say it. Where nobody listens (in pytest itself, under a debugger) nothing happens."""
    if _fd >= 0:
        os.write(_fd, _json([what, *values]).encode() + b"\n")


# ---- outside ----


class Account:
    """What one rank told, as it came out of the box: lines of a stamp in the zygote's seconds and a JSON list."""

    def __init__(self, text: bytes):
        self.memory: dict[int, list] = {}  # what each meter said when it ended, in the order of MEMORY
        self.took: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)  # (seconds inside, outside)
        self.starved: list[float] = []  # seconds of b's that were waited for a core
        self.wrong = ""
        self._begun = 0.0
        self._made: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # (± bytes, elements), by meter
        self._saved: defaultdict[int, int] = defaultdict(int)  # bytes, by meter
        self._accesses: dict[int, list] = {}
        try:
            for line in text.splitlines():
                stamp, _, told = line.partition(b" ")
                what, *values = json.loads(told)
                getattr(self, f"_on_{what}")(float(stamp), *values)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError) as error:
            self.wrong = f"the instruments told what they never tell ({type(error).__name__})"

    def disagrees(self, value: Any) -> str:
        """Where the value, or what was told last, is not what was told before; "" if all agree."""
        if self.wrong:
            return self.wrong
        ends = list(self.memory.values())
        for told in _dicts(value, MEMORY):
            if [told[name] for name in MEMORY] not in ends:
                return f"a peak of {readable(told['peak_bytes'])} is none that was metered"
        seconds: dict[int, list] = {len(pairs): [] for pairs in self.took.values()}
        for pairs in self.took.values():
            seconds[len(pairs)].append([inside for inside, _ in pairs])
        seconds.setdefault(len(self.starved), []).append(self.starved)
        for times in _times(value):
            if times not in seconds.get(len(times), [times]):
                return f"{len(times)} times of {sum(times):.3g} s in all are none that were taken"
        return ""

    def peaks(self) -> list[int]:
        """Bytes that each meter of memory says were there at most."""
        return [numbers[0] for numbers in self.memory.values()]

    # One method a kind of line.

    def _on_made(self, stamp: float, meter: int, bytes: int, elements: int) -> None:
        self._made[meter].append((int(bytes), int(elements)))

    def _on_saved(self, stamp: float, meter: int, bytes: int) -> None:
        self._saved[meter] += int(bytes)

    def _on_memory(self, stamp: float, meter: int, *numbers: int) -> None:
        peak = max(itertools.accumulate((b for b, _ in self._made[meter]), initial=0))
        largest = max((n for _, n in self._made[meter]), default=0)
        for seen, told in ((peak, numbers[0]), (largest, numbers[1]), (self._saved[meter], numbers[2])):
            if seen > told:
                self.wrong = self.wrong or f"{seen:,} were metered when it happened, {told:,} at the end"
        self.memory[meter] = [int(n) for n in numbers]

    def _on_launched(self, stamp: float, watch: int, *seen: Any) -> None:
        self._accesses[watch] = list(seen)

    def _on_watched(self, stamp: float, watch: int, *seen: Any) -> None:
        was = self._accesses.get(watch, [0, 0, 0])
        if was != list(seen):
            self.wrong = self.wrong or (
                f"{was[1]} accesses in {was[0]} launches were seen when they happened, {seen[1]} in {seen[0]} at the "
                "end, or other ones"
            )

    def _on_begin(self, stamp: float) -> None:
        self._begun = stamp

    def _on_took(self, stamp: float, which: int, seconds: float) -> None:
        self.took[int(which)].append((float(seconds), stamp - self._begun))

    def _on_starved(self, stamp: float, seconds: float) -> None:
        self.starved.append(float(seconds))


def _dicts(value: Any, keys: tuple[str, ...]) -> Iterator[dict]:
    """All dictionaries in a value that have these keys, among others."""
    if isinstance(value, dict):
        if all(k in value for k in keys):
            yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _dicts(part, keys)


def _times(value: Any) -> Iterator[list[float]]:
    """All lists of floats, at least two, in a list or tuple."""
    if isinstance(value, list | tuple):
        if len(value) > 1 and all(type(x) is float for x in value):
            yield list(value)
        else:
            for part in value:
                yield from _times(part)
