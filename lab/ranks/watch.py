"""Refuses forbidden calls when the solution makes them, under any name.

The source names most such calls, and the student hears of them before anything runs (lab/solution/forbidden.py). A name
that is put together is met here: functions are refused where they are found, classes where an object is made,
operators where torch dispatches them. Torch itself and stand-ins go on. A caught refusal is reported all the same.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterable
from typing import Any

from ..course.assignment import ROOT
from ..solution.forbidden import ForbiddenCall
from . import operators

_STANDARD = os.path.dirname(os.__file__) + os.sep


class Watch:
    """Over the solution in folder `impl`, from `guard` on and for as long as this process lives."""

    def __init__(self, impl: str):
        self.impl = impl + os.sep
        self.trusted = (_STANDARD, str(ROOT) + os.sep, *(p.rstrip(os.sep) + os.sep for p in sys.path if p), "<frozen")
        self.forbidden: tuple[str, ...] = ()
        self._guarded = dict[int, tuple[Any, str]]()  # by id: the object, which must live on, or another gets its id

    def guard(self, names: Iterable[str]) -> None:
        """Refuse the solution what `names` stand for: operators, functions, classes, modules."""
        self.forbidden = tuple(names)
        sys.meta_path.insert(0, self)
        operators.refuse(self.forbidden, lambda: self._asks(through=self._is_trusted))
        for name in self.forbidden:
            owner, _, attribute = name.rpartition(".")
            if name in sys.modules:
                for key, value in [*vars(sys.modules[name]).items()]:
                    if str(getattr(value, "__module__", "")).lstrip("_").startswith(name):
                        self._guard(sys.modules[name], key, value, f"{name}.{key}", _is_standard)
            elif (value := getattr(sys.modules.get(owner), attribute, None)) is not None:
                self._guard(sys.modules[owner], attribute, value, name, self._is_trusted)
                defining = sys.modules.get(getattr(value, "__module__", None) or "")
                if getattr(defining, attribute, None) is value:  # torch.distributed's are defined elsewhere
                    self._guard(defining, attribute, value, name, _is_standard)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse the solution a module that is not loaded yet."""
        if any(f"{name}.".startswith(f"{other}.") for other in self.forbidden) and self._asks(through=_is_standard):
            raise _refusal(name)

    def look(self) -> None:
        """After a probe: raise ForbiddenCall for what was refused in it, or is the library's under another name."""
        if ForbiddenCall.first is not None:
            raise ForbiddenCall.first
        for module in [*sys.modules.values()]:
            if (getattr(module, "__file__", None) or "").startswith(self.impl):
                for name, value in vars(module).items():
                    _, forbidden = self._guarded.get(id(value), (None, ""))
                    if forbidden:
                        raise ForbiddenCall(f"{module.__name__}.{name} is the forbidden {forbidden}")

    def _guard(self, owner: Any, attribute: str, value: Any, name: str, through: Any) -> None:
        """Refuse a function where it is found, and a class where an object of it is made."""
        if isinstance(value, type) and inspect.isfunction(made := vars(value).get("__init__")):
            value.__init__ = self._refusing(made, name, _is_standard)  # type: ignore[misc]
            self._guarded[id(value)] = value, name
        elif inspect.isroutine(value):
            setattr(owner, attribute, refused := self._refusing(value, name, through))
            self._guarded[id(refused)] = refused, name

    def _refusing(self, function: Any, name: str, through: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._asks(through):
                raise _refusal(name)
            return function(*args, **kwargs)

        del called.__wrapped__  # or it would be a way around
        return called

    def _asks(self, through: Any) -> bool:
        """Whether the solution asks. through: whether a caller's file only does as it is asked."""
        frame = sys._getframe(2)
        while frame.f_back and through(frame.f_code.co_filename):
            frame = frame.f_back
        return not self._is_trusted(frame.f_code.co_filename)

    def _is_trusted(self, file: str) -> bool:
        return file.startswith(self.trusted) and not file.startswith(self.impl)


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and "-packages" not in file)


def _refusal(name: str) -> ForbiddenCall:
    return ForbiddenCall(f"a solution that has {name} do what it is asked to write does not do the exercise")
