"""What a computation allocates and keeps, read off torch's dispatcher: exact on any machine, no GPU needed."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Memory:
    """Storages made while metering, in bytes and elements; the caller's inputs do not count."""

    peak_bytes: int = 0  # most alive at once
    live_bytes: int = 0
    largest_elements: int = 0  # of one storage
    largest_op: str = ""  # that made it
    saved_bytes: int = 0  # kept by autograd for backward, each storage once, inputs included
    saved_largest_elements: int = 0
    ops: dict[str, int] = field(default_factory=dict)  # operator -> calls

    def plain(self) -> dict:
        return asdict(self)


@contextlib.contextmanager
def meter(inputs: Iterable[torch.Tensor] = ()) -> Iterator[Memory]:
    """Meter everything torch does inside. inputs: tensors that exist already and are not charged."""
    memory = Memory()
    saved: dict[int, torch.UntypedStorage] = {}  # holding them keeps their keys from being reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in saved:
            saved[storage._cdata] = storage
            memory.saved_bytes += storage.nbytes()
        memory.saved_largest_elements = max(memory.saved_largest_elements, storage.nbytes() // tensor.element_size())
        return tensor

    with _Meter(memory, inputs), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield memory


class _Meter(TorchDispatchMode):
    def __init__(self, memory: Memory, inputs: Iterable[torch.Tensor]):
        super().__init__()
        self.memory, self.counter = memory, Counter[str]()
        self.known = {t.untyped_storage()._cdata: weakref.ref(t.untyped_storage()) for t in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counter[str(func)] += 1
        self.memory.ops = dict(self.counter)
        # Arguments too: a tensor made behind the dispatcher (from numpy, say) is charged when it is first used.
        for tensor in tree_leaves((out, args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, str(func))
        return out

    def _see(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key, memory = storage._cdata, self.memory
        if key in self.known:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.known.pop(key, None)
            memory.live_bytes -= size

        self.known[key] = weakref.ref(storage, freed)
        memory.live_bytes += size
        memory.peak_bytes = max(memory.peak_bytes, memory.live_bytes)
        elements = size // tensor.element_size()
        if elements > memory.largest_elements:
            memory.largest_elements, memory.largest_op = elements, op
