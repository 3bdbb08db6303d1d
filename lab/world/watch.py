"""What a solution has no business with while a probe runs: other people's frames, the heap, programs, sockets, patches.

The probe holds what all ranks were given, and the instruments lie in the same memory. An audit hook (PEP 578), which
cannot be taken back, refuses the ways to reach them that Python tells of; and what could be replaced is looked at again
when the probe has returned. Whoever catches the refusal is told on all the same.
"""

from __future__ import annotations

import _signal
import _thread
import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils import _python_dispatch

from ..assignment import ROOT
from ..forbidden import ForbiddenCall
from . import namespaces, operators

_STANDARD = os.path.dirname(os.__file__) + os.sep
_FRAMES = "looks into the frames of its callers"
_HEAP = "searches the heap"
_PROGRAMS = "starts or signals processes"
_NETWORK = "opens connections of its own"
_THREADS = "starts threads, in which nothing is seen by what measures it,"
_LIBRARY = "lets a library do what it is asked to write"  # and calls it itself
_ANSWER = "has a library do what it is asked to write"  # however far away
_SOURCE = "runs source that it puts together"
_MEMORY = "reaches past Python"
_MODES = "switches off what measures it"
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
    "os.symlink": _MEMORY,
    "ctypes.dlopen": _MEMORY, "ctypes.dlsym": _MEMORY, "ctypes.dlsym/handle": _MEMORY, "ctypes.addressof": _MEMORY,
    "ctypes.cdata": _MEMORY, "ctypes.cdata/buffer": _MEMORY, "ctypes.string_at": _MEMORY,
    "ctypes.call_function": _MEMORY,
}  # fmt: skip
_WAYS_TO_A_FRAME = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_BY_ITSELF = (_SOURCE, _CODE)  # libraries do these for everybody: a namedtuple is made of text
_FOR_OTHERS = (_PROGRAMS, _NETWORK, _HEAP)  # and these for nobody, but compilers, which are programs
_COMPILERS = ("/triton/runtime/jit.py", "/triton/runtime/autotuner.py", "/triton/runtime/driver.py",
              "/triton/compiler/compiler.py", "/torch/_dynamo/")  # fmt: skip
# Libraries that hand frames on, or what is in them. Others, as typing's and torch's, look at their callers' themselves.
_HAND_ON = ("/inspect.py", "/traceback.py", "/logging/__init__.py", "/bdb.py", "/pdb.py", "/doctest.py", "/pydoc.py",
            "/signal.py", "/torch/_jit_internal.py", "/torch/fx/experimental/unification/", "/numpy/matrixlib/",
            "/numpy/lib/_index_tricks_impl.py")  # fmt: skip
_LOOKS = {"f_globals", "f_code", "f_lineno", "f_lasti", "tb_frame", "getframeinfo"}  # names that a function uses then
_INSPECT, _TRACEBACK = f"{_STANDARD}inspect.py", f"{_STANDARD}traceback.py"


class Watch:
    """Over the solution in folder `impl`, from now on and for as long as this process lives."""

    def __init__(self, impl: str):
        self.impl = impl + os.sep
        self.trusted = (_STANDARD, str(ROOT) + os.sep, *(p.rstrip(os.sep) + os.sep for p in sys.path if p), "<frozen")
        self.forbidden: tuple[str, ...] = ()
        self._guarded = dict[int, str]()  # what they stand for, by id
        self._looking = threading.local()
        # Of these no audit hook is told: threads, in Python 3.11, what is called with a frame, and what drops modes.
        for module, name, what in (
            (_thread, "start_new_thread", _THREADS), (threading, "_start_new_thread", _THREADS),
            (threading, "_start_joinable_thread", _THREADS), (_signal, "signal", _FRAMES), (signal, "signal", _FRAMES),
            (_python_dispatch, "_disable_current_modes", _MODES), (_python_dispatch, "_pop_mode", _MODES),
            (torch._C, "_DisableTorchDispatch", _MODES), (torch._C, "_ExcludeDispatchKeyGuard", _MODES),
        ):  # fmt: skip
            if start := getattr(module, name, None):
                setattr(module, name, self._unless_the_solutions(start, what))
        sys.addaudithook(self._hear)

    def guard(self, names: Iterable[str]) -> None:
        """Refuse the solution what `names` stand for, however it gets there: operators, functions, classes, modules.

        Torch, which may need them itself, and stand-ins go on.
        """
        self.forbidden = tuple(names)
        sys.meta_path.insert(0, self)
        operators.refuse(self.forbidden, lambda: self._asks(1, _ANSWER))
        for name in self.forbidden:
            owner, _, attribute = name.rpartition(".")
            if name in sys.modules:
                for key, value in [*vars(sys.modules[name]).items()]:
                    if str(getattr(value, "__module__", "")).lstrip("_").startswith(name):
                        self._guard(sys.modules[name], key, value, f"{name}.{key}", _LIBRARY)
            elif (value := getattr(sys.modules.get(owner), attribute, None)) is not None:
                self._guard(sys.modules[owner], attribute, value, name, _ANSWER)
                defining = sys.modules.get(getattr(value, "__module__", None) or "")
                if getattr(defining, attribute, None) is value:  # torch.distributed's are defined elsewhere
                    self._guard(defining, attribute, value, name, _LIBRARY)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse the solution a module that is not loaded yet."""
        if any(f"{name}.".startswith(f"{other}.") for other in self.forbidden):
            self._refuse(_LIBRARY, name)

    def _guard(self, owner: Any, attribute: str, value: Any, name: str, what: str) -> None:
        """Refuse a function where it is found, and a class where an object of it is made."""
        if isinstance(value, type) and inspect.isfunction(made := vars(value).get("__init__")):
            value.__init__ = self._unless_the_solutions(made, _LIBRARY, name)  # type: ignore[misc]
            self._guarded[id(value)] = name
        elif inspect.isroutine(value):
            setattr(owner, attribute, refused := self._unless_the_solutions(value, what, name))
            self._guarded[id(refused)] = name

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Around a probe: raises ForbiddenCall for what was refused in it, or replaced and not put back."""
        self._looking.on = True  # at memory, which a solution may not
        seen = namespaces.now()
        self._looking.on = False
        try:
            yield
        finally:
            if ForbiddenCall.first is not None:
                raise ForbiddenCall.first
            self._handed_on()
            self._look_again(seen)

    def _handed_on(self) -> None:
        """What the library has for the exercise is not the solution's because it gives it another name."""
        for module in [*sys.modules.values()]:
            if (getattr(module, "__file__", None) or "").startswith(self.impl):
                for name, value in vars(module).items():
                    if id(value) in self._guarded:
                        raise ForbiddenCall(f"{module.__name__}.{name} is the forbidden {self._guarded[id(value)]}")

    def _look_again(self, seen: namespaces.Seen) -> None:
        self._seen = seen  # and kept until the process ends
        self._looking.on = True
        changed = [then for then in seen.namespaces if not then.is_unchanged()]
        self._looking.on = False
        for then in changed:
            now = vars(then.where)
            for name, old in then.held().items():
                if now.get(name) is not old and _is_somebodys(old) and not self._may_replace(now.get(name), old):
                    raise ForbiddenCall(f"a solution does not replace what others use: {then.where.__name__}.{name}")
        if gone := next((n for n, m in seen.modules.items() if sys.modules.get(n) is not m), None):
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
        if event in ("open", "os.symlink") and not _is_in_proc(args[0], known=event == "open" and args[1] is not None):
            return
        self._refuse(what, event)

    def _unless_the_solutions(self, function: Any, what: str, name: str = "") -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._refuse(what, name or getattr(function, "__qualname__", "a call"))
            return function(*args, **kwargs)

        del called.__wrapped__  # or it would be a way around
        return called

    def _refuse(self, what: str, event: str) -> None:
        """Raise ForbiddenCall where the solution asks for it."""
        if self._asks(2, what):
            raise ForbiddenCall(f"a solution that {what} ({event}) does not do the exercise")

    def _asks(self, depth: int, what: str) -> bool:
        """Whether the solution asks: itself, or through libraries that only do as they are asked."""
        self._looking.on = True  # to look is to ask for a frame
        try:
            frame: FrameType | None = sys._getframe(depth + 1)
            while frame and self._is_asked(frame, what):
                frame = frame.f_back
            return frame is not None and not self._is_trusted(frame)
        finally:
            self._looking.on = False

    def _is_trusted(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith(self.trusted) and not file.startswith(self.impl)

    def _is_asked(self, frame: FrameType, what: str) -> bool:
        """Whether it is a library's function that does `what` for whoever calls it."""
        code = frame.f_code
        if what == _ANSWER:
            return self._is_trusted(frame)
        if what in _BY_ITSELF:
            return False
        if what not in (_FRAMES, *_FOR_OTHERS):
            return _is_standard(code.co_filename)
        if not self._is_library(code.co_filename):
            return False
        if what in _FOR_OTHERS:
            return not any(part in code.co_filename for part in _COMPILERS)
        if code.co_filename in (_INSPECT, _TRACEBACK):
            return code.co_filename == _INSPECT or code.co_name.startswith("walk_") or _with_locals(frame)
        if not any(part in code.co_filename for part in _HAND_ON):
            return False
        return "f_locals" in code.co_names or _LOOKS.isdisjoint(code.co_names)

    def _is_library(self, file: str) -> bool:
        return _is_standard(file) or ("-packages" in file and file.startswith(self.trusted) and self.impl not in file)


def _with_locals(frame: FrameType | None) -> bool:
    """Whether a traceback is written down with what its frames hold."""
    while frame and frame.f_code.co_filename == _TRACEBACK:
        if frame.f_locals.get("capture_locals"):
            return True
        frame = frame.f_back
    return False


def _is_in_proc(path: Any, known: bool) -> bool:
    """Whether a path leads into /proc. known: from the root or the current folder, and not from any that is open."""
    if not isinstance(path, str | bytes):
        return False
    path = os.fsdecode(path)
    if not known and not path.startswith("/") and "proc" in path.split("/"):
        return True
    return f"{os.path.realpath(path)}/".startswith("/proc/")


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and "-packages" not in file)


def _is_somebodys(value: Any) -> bool:
    """Whether it is a function, a class, or an object of ours: counters and flags may change."""
    return callable(value) or type(value).__module__.startswith("lab.")
