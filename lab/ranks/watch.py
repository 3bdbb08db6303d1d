"""Refuses forbidden calls when the solution makes them, under any name.

Most forbidden calls appear in the source by name; lab/solution/forbidden.py reports them before anything runs. This
module refuses the other calls while the solution runs, such as a call by a name built at run time. It wraps functions,
refuses to instantiate classes, and replaces operators in torch's dispatcher. Torch may still instantiate these classes
and call functions of forbidden modules, and so may the stand-ins of this run. The run reports a refusal even if the
solution catches the exception.
"""

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Iterable
from typing import Any

from ..course.assignment import ROOT
from ..solution.forbidden import ForbiddenCall
from . import operators

_STANDARD = os.path.dirname(os.__file__) + os.sep
_LAB = str(ROOT / "lab") + os.sep
_STAND_INS = _LAB + "standins" + os.sep


class Watch:
    """Refuses forbidden calls of the solution in folder `impl`, from `guard` until this process ends."""

    def __init__(self, impl: str):
        self.impl = impl + os.sep
        self.trusted = (_STANDARD, str(ROOT) + os.sep, *(p.rstrip(os.sep) + os.sep for p in sys.path if p), "<frozen")
        self.forbidden: tuple[str, ...] = ()
        self.stand_ins = False
        self.last_module = next(reversed(sys.modules))  # last module imported before the solution's modules

    def guard(self, names: Iterable[str], stand_ins: bool = False) -> None:
        """Refuse the operators, functions, classes and modules with these names to the solution.

        stand_ins: whether this run has stand-ins, which may call what is forbidden.
        """
        global _watch
        _watch, self.forbidden, self.stand_ins = self, tuple(names), stand_ins
        sys.meta_path.insert(0, self)
        operators.refuse(self.forbidden, lambda: self._untrusted(skip=self._is_trusted))
        for owner, attribute, refusing in refusals(self.forbidden)[0]:
            setattr(owner, attribute, refusing)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse to import a forbidden module if the solution requests it."""
        if any(f"{name}.".startswith(f"{other}.") for other in self.forbidden) and self._untrusted(skip=self._is_relay):
            raise _refusal(name)

    def check(self) -> None:
        """Raise ForbiddenCall if a forbidden call was refused, or if a solution's module holds a forbidden object."""
        if ForbiddenCall.first is not None:
            raise ForbiddenCall.first
        _, forbidden = refusals(self.forbidden)
        for name in [*itertools.takewhile(lambda name: name != self.last_module, reversed(sys.modules))]:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(self.impl):
                for key, value in vars(sys.modules[name]).items():
                    if id(value) in forbidden:
                        raise ForbiddenCall(f"{name}.{key} is the forbidden {forbidden[id(value)]}")

    def _untrusted(self, skip: Any) -> bool:
        """Whether the solution made this call. skip(file): whether to look past callers in this file."""
        frame = sys._getframe(2)
        while frame.f_back and skip(frame.f_code.co_filename):
            frame = frame.f_back
        return not self._is_trusted(frame.f_code.co_filename)

    def _is_relay(self, file: str) -> bool:
        """Whether code in this file only calls what its caller requests."""
        return _is_standard(file) or (file.startswith(_LAB) and not (self.stand_ins and file.startswith(_STAND_INS)))

    def _is_trusted(self, file: str) -> bool:
        return file.startswith(self.trusted) and not file.startswith(self.impl)


_watch: Watch  # of this process


@functools.cache
def refusals(names: tuple[str, ...]) -> tuple[list[tuple[Any, str, Any]], dict[int, str]]:
    """Return [(owner, attribute, new value that refuses calls)] for these names, and {id of object: forbidden name}.

    The zygote calls this before it forks. In each fork it would take tens of milliseconds, because reading all modules
    copies their memory pages.
    """
    replacements, forbidden = dict[tuple[int, str], tuple[Any, str, Any]](), dict[int, str]()

    def refuse(owner: Any, attribute: str, value: Any, name: str, is_named: bool = False) -> None:
        if isinstance(value, type) and inspect.isfunction(init := vars(value).get("__init__")):
            forbidden[id(value)] = name
            replacements.setdefault((id(value), "__init__"), (value, "__init__", _refusing(init, name, is_named=False)))
        elif inspect.isroutine(value) and (is_named or (id(owner), attribute) not in replacements):
            refusing = _refusing(value, name, is_named)
            forbidden[id(refusing)] = name
            replacements[id(owner), attribute] = owner, attribute, refusing

    for name in names:
        for module in [m for n, m in [*sys.modules.items()] if f"{n}.".startswith(f"{name}.")]:
            for key, value in [*vars(module).items()]:
                if str(getattr(value, "__module__", "")).lstrip("_").startswith(name):
                    refuse(module, key, value, f"{module.__name__}.{key}")
        owner, _, attribute = name.rpartition(".")
        value = getattr(sys.modules.get(owner), attribute, None)
        if name not in sys.modules and value is not None:
            refuse(sys.modules[owner], attribute, value, name, is_named=True)
            defining = sys.modules.get(getattr(value, "__module__", None) or "")
            if getattr(defining, attribute, None) is value:  # torch.distributed re-exports
                refuse(defining, attribute, value, name)
    return [*replacements.values()], forbidden


def _refusing(function: Any, name: str, is_named: bool) -> Any:
    """Return a function that refuses the solution. is_named: also refuse if torch calls it for the solution."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _watch._untrusted(_watch._is_trusted if is_named else _watch._is_relay):
            raise _refusal(name)
        return function(*args, **kwargs)

    del wrapper.__wrapped__  # it would give access to the original
    return wrapper


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and "-packages" not in file)


def _refusal(name: str) -> ForbiddenCall:
    return ForbiddenCall(f"{name} is forbidden: it would be the answer itself")
