"""Memory that a computation allocates and keeps, measured in torch's dispatcher: exact on any machine."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Observer(TorchDispatchMode):
    """Calls `see(func, out, args, kwargs)` after each torch operator inside the block."""

    def __init__(self, see: Callable[..., object]):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, out, args, kwargs)
        return out


@dataclass
class Memory:
    """Memory of storages made inside the block, without the caller's inputs."""

    peak_bytes: int = 0  # most bytes alive at once
    live_bytes: int = 0
    largest_elements: int = 0  # of the largest storage
    largest_op: str = ""  # the operator that made it
    largest_shape: list[int] = field(default_factory=list)
    largest_line: str = ""  # the implementation's line that called the operator
    saved_bytes: int = 0  # saved by autograd for backward: each storage once, including inputs
    phase: str = "forward"  # set this when a new phase begins
    events: list[tuple[str, int]] = field(default_factory=list)  # (phase of the allocation, ± bytes), in order

    def plain(self) -> dict:
        """Return the measurements as a dict, without phase and events."""
        return {name: value for name, value in asdict(self).items() if name not in ("phase", "events")}

    def timeline(self) -> dict[str, list[int]]:
        """Return live bytes after each event, by the phase of their allocation."""
        lines: dict[str, list[int]] = {phase: [0] for phase, _ in self.events}
        for phase, change in self.events:
            for name, line in lines.items():
                line.append(line[-1] + (change if name == phase else 0))
        return lines

    def charge(self, tensor: torch.Tensor, op: str, known: dict[int, weakref.ref]) -> None:
        """Count the storage of a tensor that `op` returned or read, until it is freed. Skips storages in `known`."""
        storage = tensor.untyped_storage()
        phase, size = self.phase, storage.nbytes()
        if not _remember(known, storage, lambda: self._change(phase, -size)):
            return
        self._change(phase, size)
        elements = size // tensor.element_size()
        if elements > self.largest_elements:
            self.largest_elements, self.largest_op = elements, op
            frame, self.largest_shape = innermost(), list(tensor.shape)
            self.largest_line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""

    def _change(self, phase: str, change: int) -> None:
        self.events.append((phase, change))
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@contextlib.contextmanager
def meter(inputs: Iterable[torch.Tensor] = ()) -> Iterator[Memory]:
    """Measure the memory of all torch operators inside. inputs: existing tensors, which do not count."""
    memory = Memory()
    saved: dict[int, weakref.ref] = {}  # weak references, so that backward can free the storages
    known: dict[int, weakref.ref] = {}
    for tensor in inputs:
        _remember(known, tensor.untyped_storage())

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _remember(saved, tensor.untyped_storage()):
            memory.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def see(func: Any, *values: Any) -> None:
        # Also charge arguments: no operator makes a tensor from numpy, so it counts when it is first used.
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                memory.charge(tensor, str(func), known)

    with Observer(see), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield memory


def innermost() -> FrameType | None:
    """Return the innermost stack frame in the implementation, or None if it is not running."""
    frame: FrameType | None = sys._getframe()
    while frame and not frame.f_globals.get("__name__", "").startswith("impl."):
        frame = frame.f_back
    return frame


class LiveStorages(Observer):
    """Bytes of all live storages that torch operators have returned or read, at their current sizes."""

    def __init__(self) -> None:
        super().__init__(self._update)
        self.known: dict[int, weakref.ref] = {}
        self.peak = 0

    def _update(self, func: Any, *values: Any) -> None:
        for x in tree_leaves(values):
            for y in _local_tensors(x):
                _remember(self.known, y.untyped_storage())
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        storages = [ref() for ref in list(self.known.values())]
        return sum(s.nbytes() for s in storages if s is not None)

    def restart(self) -> None:
        self.peak = self.now()


def _remember(
    known: dict[int, weakref.ref], storage: torch.UntypedStorage, on_free: Callable[[], object] = lambda: None
) -> bool:
    """Add a storage to `known` until it is freed; then its key may be reused. Return whether it is new."""
    key = storage._cdata
    if key in known:
        return False

    def forget(_: Any) -> None:
        known.pop(key, None)
        on_free()

    known[key] = weakref.ref(storage, forget)
    return True


def _local_tensors(x: Any) -> list[torch.Tensor]:
    """Return the tensors of x that have memory. A DTensor has the full shape, so take this rank's part instead."""
    if not isinstance(x, torch.Tensor):
        return []
    if not is_traceable_wrapper_subclass(x):
        return [x]
    return [y for name in x.__tensor_flatten__()[0] for y in _local_tensors(getattr(x, name))]
