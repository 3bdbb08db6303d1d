"""What the instruments of a rank tell as it happens, on a pipe that only takes: what is told cannot be taken back.

The zygote reads the pipe, stamps each line with its own clock, and hands all of it out beside the answer. Outside,
`Account` compares the answer with it: rows of the ledger that were changed, left out or added afterwards, storages that
were made and then not counted, accesses of kernels that are gone, seconds that are not those that were taken. An answer
that does not agree with what was told on its way is none: the probe fails as "forged".

It proves that no number was moved after it was taken, and that `lab` and the probe consist at the end of what they did
at the start. It does not prove that numbers were right when they were taken: what goes past an instrument is not told,
and code that knows this page can tell a story of its own. For that there are readings from outside the box, of the
loopback, of memory and of the clock: grader/evidence.py.
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from ..forbidden import refuses
from .board import readable

LIMIT = 16 << 20  # bytes that are kept of what one rank tells
LARGE = 256 << 10  # bytes from which on a storage is told of when it is made, and when it goes
# What a row says of itself when it is written, and of the first wait for it; the rest depends on the peers.
FACTS = ("number", "op", "bytes", "elements", "dtype", "group", "phase", "rank", "issued_s", "storage", "waited_s")
MEMORY = ("peak_bytes", "largest_elements", "saved_bytes", "saved_largest_elements")
# Beside lab: what instruments stand on. A solution that patches them is told of; the probe goes on.
OTHERS = (
    "builtins", "time", "torch.distributed", "torch.autograd.graph", "torch.utils._python_dispatch", "torch.cuda",
)  # fmt: skip

_fd = -1


def listen(fd: int) -> None:
    """From here on, what is told goes to this descriptor."""
    global _fd
    _fd = fd


def tell(what: str, *values: Any) -> None:
    """Say it. Where nobody listens (in pytest itself, under a debugger) nothing happens."""
    if _fd >= 0:
        os.write(_fd, json.dumps([what, *values], separators=(",", ":")).encode() + b"\n")


def facts(row: dict) -> list:
    return [row[name] for name in FACTS]


# ---- what everything consists of ----


class Seal:
    """The functions, classes and modules that lab, the probe and OTHERS consist of, and the code of each."""

    def __init__(self) -> None:
        self.modules, self.last = set[str](), ""  # the last one in sys.modules that was looked at
        self.parts: list[tuple[str, Mapping, str, Any]] = []  # (full name, namespace, name in it, what it is)
        self.code: list[tuple[str, FunctionType, Any, Any]] = []  # (full name, function, its code, its defaults)
        self.sizes: list[tuple[str, Mapping, int]] = []

    def take(self, *more: str) -> None:
        """Remember what is there now. more: names of modules beside lab and OTHERS."""
        new = [*itertools.takewhile(lambda name: name != self.last, reversed(sys.modules))]  # in a child, few
        self.last = next(reversed(sys.modules))
        for name in (*(n for n in new if n in OTHERS or n.startswith("lab.")), *more):
            self.modules.add(name)
            self._add(name, vars(sys.modules[name]))
            for key, value in [*vars(sys.modules[name]).items()]:
                if issubclass(type(value), type) and value.__module__ == name:
                    self._add(f"{name}.{key}", vars(value))

    def take_again(self) -> None:
        """Remember what the same names stand for now."""
        self.parts = [(full, space, key, space.get(key)) for full, space, key, _ in self.parts]
        self.code = [(full, f, f.__code__, f.__defaults__) for full, f, _, _ in self.code]
        self.sizes = [(full, space, len(space)) for full, space, _ in self.sizes]

    def broken(self) -> list[str]:
        """The names of what is something else now, or is new where it changes a class or hides a builtin."""
        found = [full for full, space, key, part in self.parts
                 if (now := space.get(key)) is not part and not refuses(now) and not _hooked(now, part)]  # fmt: skip
        found += [full for full, f, code, defaults in self.code if f.__code__ is not code or f.__defaults__ != defaults]
        for full, space, size in self.sizes:
            if len(space) != size:  # a module may grow: by what is imported
                known = {name for name, *_ in self.parts}
                new = [k for k in space if f"{full}.{k}" not in known and callable(space[k])]
                found += [f"{full}.{k}" for k in new if full not in self.modules or hasattr(builtins, k)]
        return found

    def _add(self, full: str, space: Mapping) -> None:
        self.sizes.append((full, space, len(space)))
        for key, part in [*space.items()]:
            if (
                issubclass(type(part), _PARTS) or key == "ledger"
            ):  # type(): some of torch's objects warn of being looked at
                self.parts.append((f"{full}.{key}", space, key, part))
            if type(part) is FunctionType and full.startswith(_OURS):
                self.code.append((f"{full}.{key}", part, part.__code__, part.__defaults__))


def _hooked(now: Any, part: Any) -> bool:
    """Whether it is what torch makes of an optimizer's step when the first one is made."""
    if getattr(now, "__wrapped__", None) is not part:
        return False
    from torch.optim import Optimizer

    return now.__code__ in Optimizer.profile_hook_step.__code__.co_consts


_OURS = ("lab.", "tests.")
_PARTS = (FunctionType, BuiltinFunctionType, type, ModuleType, property, classmethod, staticmethod)
_seal = Seal()


def remember() -> None:
    """In the zygote: most of it is the same for all of its children."""
    _seal.take()


def seal(probe: str, again: bool = False) -> Callable[[Any], None]:
    """Seal what there is, before any code under test; call what comes back with the ledger when the probe is done.

    It tells what the ledger says then, and what is no longer what it was. again: the zygote's own memory does not
    hold, for a simulated device has replaced much.
    """
    _seal.take(probe)
    if again:
        _seal.take_again()
    broken = _seal.broken

    def done(ledger: Any) -> None:
        changed = broken()
        changed += [f"lab.world.group.ledger.{name}" for name, part in vars(ledger).items() if callable(part)]
        others = [name for name in changed if name.startswith(tuple(f"{o}." for o in OTHERS))]
        rows = [facts(row.plain()) for row in ledger.rows]
        tell("end", len(rows), _digest(rows), [n for n in changed if n not in others][:9], others[:9])

    return done


def _digest(rows: Iterable[list]) -> str:
    return hashlib.sha256(json.dumps([*rows]).encode()).hexdigest()


# ---- outside ----


class Account:
    """What one rank told, as it came out of the box: lines of a stamp in the zygote's seconds and a JSON list."""

    def __init__(self, text: bytes):
        self.rows: dict[int, list] = {}
        self.memory: dict[int, list] = {}  # what each meter said when it ended, in the order of MEMORY
        self.took: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)  # (seconds inside, outside)
        self.grown: list[int] = []  # bytes, by lab.measure.process
        self.patched: list[str] = []  # of OTHERS
        self.wrong = ""
        self._end: list = []
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
        if not self._end:
            return "the instruments fell silent before the probe was done"
        count, digest, changed = self._end
        if changed:
            return f"{', '.join(changed)}: replaced while the probe ran"
        if digest != _digest(self.rows.values()):
            return f"the ledger held {count} rows at the end, {len(self.rows)} had been written, or other ones"
        known = {json.dumps(row) for row in self.rows.values()}
        for row in _dicts(value, FACTS):
            if json.dumps(facts(row)) not in known:
                return f"row #{row['number']} ({row['op']}, {readable(row['bytes'])}) is none that was written"
        ends = list(self.memory.values())
        for told in _dicts(value, MEMORY):
            if [told[name] for name in MEMORY] not in ends:
                return f"a peak of {readable(told['peak_bytes'])} is none that was metered"
        seconds: dict[int, list] = {len(pairs): [] for pairs in self.took.values()}
        for pairs in self.took.values():
            seconds[len(pairs)].append([inside for inside, _ in pairs])
        for times in _times(value):
            if times not in seconds.get(len(times), [times]):
                return f"{len(times)} times of {sum(times):.3g} s in all are none that were taken"
        return ""

    def peaks(self) -> list[int]:
        """Bytes that each meter of memory says were there at most."""
        return [numbers[0] for numbers in self.memory.values()] + self.grown

    # One method a kind of line.

    def _on_row(self, stamp: float, number: int, *rest: Any) -> None:
        op, bytes, _, _, group, *_ = rest
        if type(number) is not int or type(op) is not str or type(bytes) is not int or type(group) is not list:
            raise ValueError("no row")
        if number != len(self.rows):
            self.wrong = self.wrong or f"row #{number} was written where #{len(self.rows)} was to come"
        self.rows[number] = [number, *rest, -1.0]

    def _on_waited(self, stamp: float, number: int, when: float) -> None:
        self.rows[number][-1] = when

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

    def _on_grown(self, stamp: float, bytes: int) -> None:
        self.grown.append(max(0, int(bytes)))

    def _on_begin(self, stamp: float) -> None:
        self._begun = stamp

    def _on_took(self, stamp: float, which: int, seconds: float) -> None:
        self.took[int(which)].append((float(seconds), stamp - self._begun))

    def _on_end(self, stamp: float, count: int, digest: str, changed: list, others: list) -> None:
        self._end, self.patched = [int(count), str(digest), _names(changed)], _names(others)


def _names(told: list) -> list[str]:
    return [str(name)[:200] for name in told[:9]]


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
