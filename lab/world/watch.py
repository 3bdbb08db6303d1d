"""What a solution has no business with while a probe runs: other people's frames, the heap, programs, sockets, patches.

The probe holds what all ranks were given, and the instruments lie in the same memory. An audit hook (PEP 578), which
cannot be taken back, refuses the ways to reach them that Python tells of; and what could be replaced is looked at again
when the probe has returned. Whoever catches the refusal is told on all the same.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import inspect
import operator
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from ..assignment import ROOT
from ..forbidden import ForbiddenCall

_STANDARD = os.path.dirname(os.__file__) + os.sep
_FRAMES = "looks into the frames of its callers"
_HEAP = "searches the heap"
_PROGRAMS = "starts or signals processes"
_NETWORK = "opens connections of its own"
_THREADS = "starts threads, in which nothing is seen by what measures it,"
_LIBRARY = "lets a library do what it is asked to write"
_SOURCE = "runs source that it puts together"
_MEMORY = "reaches past Python"
_CODE = "gives a function other code"
_REFUSED = {
    "sys._getframe": _FRAMES, "sys._current_frames": _FRAMES, "sys._current_exceptions": _FRAMES,
    "sys.settrace": _FRAMES, "sys.setprofile": _FRAMES, "object.__getattr__": _FRAMES,
    "gc.get_objects": _HEAP, "gc.get_referrers": _HEAP, "gc.get_referents": _HEAP,
    "os.fork": _PROGRAMS, "os.forkpty": _PROGRAMS, "os.exec": _PROGRAMS, "os.posix_spawn": _PROGRAMS,
    "os.spawn": _PROGRAMS, "os.system": _PROGRAMS, "os.kill": _PROGRAMS, "os.killpg": _PROGRAMS,
    "signal.pthread_kill": _PROGRAMS, "subprocess.Popen": _PROGRAMS,
    "socket.connect": _NETWORK, "socket.bind": _NETWORK, "socket.sendto": _NETWORK, "socket.getaddrinfo": _NETWORK,
    "socket.gethostbyname": _NETWORK,
    "object.__setattr__": _CODE, "exec": _SOURCE, "compile": _SOURCE, "code.__new__": _SOURCE, "open": _MEMORY,
    "ctypes.dlopen": _MEMORY, "ctypes.dlsym": _MEMORY, "ctypes.dlsym/handle": _MEMORY, "ctypes.addressof": _MEMORY,
    "ctypes.cdata": _MEMORY, "ctypes.cdata/buffer": _MEMORY, "ctypes.string_at": _MEMORY,
    "ctypes.call_function": _MEMORY,
}  # fmt: skip
_WAYS_TO_A_FRAME = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_BY_ITSELF = (
    _FRAMES,
    _SOURCE,
    _CODE,
)  # the standard library does these for everybody: a namedtuple looks at its caller
_OURS = ("lab.", "tests.")
_THEIRS = ("torch", "torch.autograd", "torch.autograd.graph", "torch.cuda", "torch.distributed", "torch.nn.functional",
           "torch.distributed.distributed_c10d", "torch.testing", "time", "gc")  # fmt: skip


class Watch:
    """Over the solution in folder `impl`, from now on and for as long as this process lives."""

    def __init__(self, impl: str):
        self.impl = impl + os.sep
        self.trusted = (_STANDARD, str(ROOT) + os.sep, *(p.rstrip(os.sep) + os.sep for p in sys.path if p), "<frozen")
        self._looking = threading.local()
        # Python 3.11 tells an audit hook nothing of threads. The second and third name are bound in threading.
        for module, name in ((_thread, "start_new_thread"), (threading, "_start_new_thread"),
                             (threading, "_start_joinable_thread")):  # fmt: skip
            if start := getattr(module, name, None):
                setattr(module, name, self._unless_the_solutions(start, _THREADS))
        sys.addaudithook(self._hear)

    def guard(self, names: Iterable[str]) -> None:
        """Refuse the solution what `names` hold, wherever it finds them: functions of modules, and making objects.

        Torch, which may need them itself, and stand-ins go on. Modules that are not loaded yet are left to
        lab.forbidden.find.
        """
        for name in names:
            module, _, attribute = name.rpartition(".")
            found = vars(sys.modules[name]) if name in sys.modules else {
                attribute: getattr(sys.modules.get(module), attribute, None)
            }  # fmt: skip
            for key, value in [*found.items()]:
                if isinstance(value, type) and inspect.isfunction(made := vars(value).get("__init__")):
                    if name in sys.modules and not value.__module__.startswith(name):
                        continue
                    value.__init__ = self._unless_the_solutions(made, _LIBRARY)  # type: ignore[misc]
                elif name in sys.modules and inspect.isfunction(value) and value.__module__.startswith(name):
                    found[key] = self._unless_the_solutions(value, _LIBRARY)

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Around a probe: raises ForbiddenCall for what was refused in it, or replaced and not put back."""
        modules = {n: m for n, m in sys.modules.items() if n.startswith(_OURS) or n in _THEIRS}
        before = [(where, vars(where), dict(vars(where))) for where in _places(modules)]
        try:
            yield
        finally:
            if ForbiddenCall.first is not None:
                raise ForbiddenCall.first
            self._look_again(before, modules)

    def _look_again(self, before: list[tuple[Any, Any, dict]], modules: dict[str, Any]) -> None:
        for where, now, then in before:
            if len(now) >= len(then) and all(map(operator.is_, then.values(), now.values())):
                continue
            for name, old in then.items():
                if now.get(name) is not old and _is_somebodys(old) and not self._may_replace(now.get(name), old):
                    raise ForbiddenCall(f"a solution does not replace what others use: {where.__name__}.{name}")
        if gone := next((n for n, m in modules.items() if sys.modules.get(n) is not m), None):
            raise ForbiddenCall(f"a solution does not replace what others use: the module {gone}")

    def _may_replace(self, value: Any, old: Any) -> bool:
        """Whether it is a function of lab's or of a probe's, of the grader's bridge to another course's forks (nobody
        else hands in a folder of that name), or what torch wraps around an optimizer's step."""
        if not inspect.isfunction(value):
            return False
        file = value.__code__.co_filename
        if file.startswith(os.path.join(self.impl, "supplied", "")):
            return True
        trusted = str(ROOT) + os.sep if getattr(value, "__wrapped__", None) is not old else self.trusted
        return file.startswith(trusted) and not file.startswith(self.impl)

    def _hear(self, event: str, args: tuple) -> None:
        what = _REFUSED.get(event)
        if what is None or getattr(self._looking, "on", False):
            return
        if event == "object.__getattr__" and args[1] not in _WAYS_TO_A_FRAME:
            return
        if event == "object.__setattr__" and args[1] not in ("__code__", "__defaults__", "__kwdefaults__"):
            return
        if event == "open" and not str(args[0]).startswith("/proc/"):
            return
        self._refuse(what, event)

    def _unless_the_solutions(self, function: Any, what: str) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._refuse(what, function.__qualname__)
            return function(*args, **kwargs)

        return called

    def _refuse(self, what: str, event: str) -> None:
        """Raise ForbiddenCall where the solution asks for it."""
        self._looking.on = True  # to look is to ask for a frame
        try:
            asks = self._is_the_solutions(sys._getframe(2), what)
        finally:
            self._looking.on = False
        if asks:
            raise ForbiddenCall(f"a solution that {what} ({event}) does not do the exercise")

    def _is_the_solutions(self, frame: FrameType | None, what: str) -> bool:
        """Whether the solution asks, itself or through the standard library."""
        name = frame.f_code.co_filename if frame else ""
        if what not in _BY_ITSELF:
            while frame and _is_standard(frame.f_code.co_filename):
                frame = frame.f_back
        elif name == f"{_STANDARD}inspect.py":  # which hands frames on
            while frame and frame.f_code.co_filename == name:
                frame = frame.f_back
        elif frame and name == f"{_STANDARD}traceback.py" and frame.f_code.co_name.startswith("walk_"):
            frame = frame.f_back
        if frame is None:
            return False
        file = frame.f_code.co_filename
        return file.startswith(self.impl) or not file.startswith(self.trusted)


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and "-packages" not in file)


def _places(modules: dict[str, Any]) -> list[Any]:
    """What is looked at again: modules, the tensors' own methods, and the instruments' classes."""
    found = [*modules.values(), modules["torch"].Tensor]
    for name, module in modules.items():
        if name.startswith(_OURS):
            found += [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
    return found


def _is_somebodys(value: Any) -> bool:
    """Whether it is a function, a class, or an object of ours: counters and flags may change."""
    return callable(value) or type(value).__module__.startswith("lab.")
