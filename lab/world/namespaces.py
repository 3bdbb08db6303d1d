"""What modules and classes hold before a probe, to be compared with what they hold afterwards.

Looking at a value counts a reference to it, and in a forked process that copies its page of memory: to look at all of
torch's takes longer than most probes. So the zygote looks once, before it forks, and a rank asks of each namespace
whether it has been changed at all: CPython stamps a dictionary anew whenever it is. Where the interpreter keeps no such
stamps (from 3.14 on, and others than CPython), every rank looks at everything.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch

_OURS = ("lab.", "tests.")
_THEIRS = ("torch", "torch.autograd", "torch.autograd.graph", "torch.cuda", "torch.distributed", "torch.nn.functional",
           "torch.distributed.distributed_c10d", "torch.testing", "time", "gc")  # fmt: skip
_STAMP = 24  # bytes into a dictionary: behind the counter, the type and the length


@dataclass(frozen=True)
class Namespace:
    """A module or a class, and what it held."""

    where: Any
    values: dict[str, Any]
    place: int  # where its dictionary lies
    stamp: int  # the dictionary's, then; -1 if it has none

    @classmethod
    def of(cls, where: Any) -> Namespace:
        own = vars(where)
        place = id(own if isinstance(own, dict) else gc.get_referents(own)[0])  # a class shows a proxy of it
        return cls(where, dict(own), place, _stamp(place))

    def held(self) -> dict[str, Any]:
        """By name, and of a class what it had from others and has now itself."""
        values = dict(self.values)
        for base in self.where.__mro__[1:] if isinstance(self.where, type) else ():
            for name in vars(self.where).keys() & vars(base).keys() - values.keys():
                values[name] = vars(base)[name]
        return values

    def is_unchanged(self) -> bool:
        return self.stamp != -1 and self.stamp == _stamp(self.place)


_known: dict[str, list[Namespace]] = {}  # by module: its own, and those of its classes
_last = ""  # of the modules that were there then


def remember() -> None:
    """Look once at all that is there; ranks that are forked from here need not."""
    global _known, _last
    _known = {name: _look(name, sys.modules[name]) for name in _names([*sys.modules])}
    _last = [*sys.modules][-1]


@dataclass(frozen=True)
class Seen:
    """What there was at one moment. To let go of it would touch all that is in it."""

    namespaces: list[Namespace]
    modules: dict[str, Any]  # by name
    known: dict[str, list[Namespace]]


def now() -> Seen:
    """What there is. What was remembered is the caller's alone from here on."""
    global _known, _last
    known, last = _known, _last
    _known, _last = {}, ""
    new = []
    for name in reversed(sys.modules):  # what came later is behind; to ask the others their names would touch them
        if name == last:
            break
        new.append(name)
    modules = {name: sys.modules[name] for name in (*known, *_names(new)) if name in sys.modules}
    found = []
    for name, module in modules.items():
        kept = known.get(name, [])
        if kept and kept[0].where is module and kept[0].is_unchanged():  # its classes are those of then
            found += [it if it.is_unchanged() else Namespace.of(it.where) for it in kept]
        else:
            found += _look(name, module)
    return Seen(found, modules, known)


def _names(of: list[str]) -> list[str]:
    """Of these modules, the tests' and the instruments' own, and what of torch solutions and instruments share."""
    return [name for name in of if name.startswith(_OURS) or name in _THEIRS]


def _look(name: str, module: Any) -> list[Namespace]:
    classes: list[type] = [torch.Tensor] if name == "torch" else []
    if name.startswith(_OURS):
        classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
    return [Namespace.of(where) for where in (module, *classes)]


def _read(place: int) -> int:
    return int.from_bytes(ctypes.string_at(place + _STAMP, 8), sys.byteorder)


def _are_stamped() -> bool:
    """Whether dictionaries of this interpreter have other stamps after each kind of change, and no other time."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 14) or sys.maxsize < 2**32:
        return False
    own = {"first": 1000, "second": 2000}
    stamps = [_read(id(own))]
    for change in (lambda: own.update(third=3000), lambda: own.__setitem__("first", 4000), lambda: own.pop("second")):
        change()
        stamps.append(_read(id(own)))
    [*own.items(), own.get("first"), own.copy()]
    return len({*stamps}) == 4 and _read(id(own)) == stamps[-1]


_stamp = _read if _are_stamped() else lambda place: -1
