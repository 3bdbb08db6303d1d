"""Probes of ranges: open and close them, with a fake nvtx package, torch.cuda.nvtx, or neither."""

import contextlib
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Interruption(Exception):
    """The exception that leaves a range early."""


class Nvtx(types.ModuleType):
    """Fake nvtx package: records pushes and pops."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.__spec__ = importlib.machinery.ModuleSpec("nvtx", None)
        self.events: list[list[str]] = []
        self.open: list[str] = []
        recorder = self

        class annotate(contextlib.ContextDecorator):
            def __init__(self, message: str | None = None, *args: Any, **kwargs: Any):
                self.message = str(message)

            def __enter__(self) -> Any:
                recorder.push_range(self.message)
                return self

            def __exit__(self, *error: object) -> None:
                recorder.pop_range()

        self.annotate = annotate

    def push_range(self, message: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.open.append(str(message))
        self.events.append(["push", str(message)])

    def pop_range(self, *args: Any, **kwargs: Any) -> None:
        self.events.append(["pop", self.open.pop() if self.open else "nothing was open"])

    def start_range(self, message: str | None = None, *args: Any, **kwargs: Any) -> str:
        self.push_range(message)
        return str(message)

    def end_range(self, handle: str) -> None:
        self.open.remove(handle)
        self.events.append(["pop", handle])


def _install_nvtx(backend: str) -> Any:
    """Install the fake package, or make nvtx unavailable; call before importing the implementation."""
    sys.modules["nvtx"] = Nvtx() if backend in ("package", "both") else None  # type: ignore[assignment]
    return sys.modules["nvtx"]


def _events(backend: str, recorder: Any) -> list[list[str]]:
    names: list[str] = []
    events = [] if recorder is None else [*recorder.events]
    if backend in ("package", "neither"):
        return events
    from lab.measure.device import current

    for kind, message, _ in current().ranges:
        if kind == "push":
            names.append(message)
        events.append([kind, message if kind == "push" else (names.pop() if names else "nothing was open")])
    return events


def _visit(annotate: Any, nodes: list) -> int:
    """Open nested ranges, and leave some by an exception. Return how many exceptions came out of their range."""
    caught = 0
    for name, children, broken in nodes:
        try:
            with annotate(name):
                torch.ones(2).sum()
                caught += _visit(annotate, children)
                if broken:
                    raise Interruption
        except Interruption:
            caught += 1
    return caught


def pushes_and_pops(impl: Any, tree: list, backend: str) -> dict:
    """The pushes and pops, and how many exceptions came out of their range."""
    recorder = _install_nvtx(backend)
    caught = _visit(impl.benchmarking.annotate.annotate, tree)
    return {"events": _events(backend, recorder), "caught": caught}


def decorated(impl: Any, name: str, depth: int, backend: str) -> dict:
    """Value and events of a decorated function that calls itself `depth` times."""
    recorder = _install_nvtx(backend)

    @impl.benchmarking.annotate.annotate(name)
    def count_down(n: int) -> int:
        return 0 if n == 0 else 1 + count_down(n - 1)

    return {"value": count_down(depth), "events": _events(backend, recorder)}


def profiled(impl: Any, tree: list, names: list[str], backend: str) -> list:
    """[name, start, end] of each range that torch's profiler recorded, sorted by start. Exceptions end some ranges."""
    _install_nvtx(backend)
    annotate = impl.benchmarking.annotate.annotate
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _visit(annotate, tree)
    seen = [[e.name, float(e.time_range.start), float(e.time_range.end)] for e in profile.events() if e.name in names]
    return sorted(seen, key=lambda e: (e[1], -e[2]))


def attend(impl: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> dict:
    """o and its gradients; all ranges, and the range in which each product, scale, mask and softmax ran."""
    recorder = _install_nvtx("package")
    module = impl.benchmarking.annotate
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    paths: list[list[str]] = []

    class Paths(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operator = func.name().removeprefix("aten::").partition(".")[0]
            if operator in ("mul", "div") and not getattr(args[1], "ndim", 0):
                operator = "scale"
            if operator in ("mm", "bmm", "scale", "masked_fill", "where", "_softmax"):
                paths.append([operator, " > ".join(recorder.open)])
            return func(*args, **(kwargs or {}))

    with Paths():
        o = module.annotated_attention(q, k, v, is_causal)
    events = [list(e) for e in recorder.events]
    o.backward(torch.ones_like(o))
    return {"o": o, "gradients": [t.grad for t in (q, k, v)], "events": events, "places": paths}
