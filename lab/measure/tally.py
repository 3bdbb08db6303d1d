"""Counts a step's FLOPs, memory traffic and memory, per kernel and per storage, on real tensors or without data.

Tensors on the meta device have shapes and no numbers. Most of their operators are written in Python, and take longer
than the arithmetic of a small model. So we cache the shapes of an operator's results by the shapes of its inputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..cluster.events import KINDS, Compute
from ..cluster.prices import FUSED
from .memory import innermost
from .roofline import is_free, operator_bytes, operator_dtype, operator_flops

aten = torch.ops.aten
_PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}  # positions of both factors

_META, empty_strided = torch.device("meta"), torch.empty_strided
_NO_DATA = ("called on meta tensors", "Cannot copy out of meta", "meta function for torch.nonzero")


class NeedsData(RuntimeError):
    """A step tried to read numbers from a tensor without data."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage's size in bytes, and its kind. final: whether the kind can no longer change."""

    bytes: int = 0
    kind: str = "buffers"
    final: bool = False


class Tally(TorchDispatchMode):
    """Records all torch operators inside the block. `events`, in order: kernels, and (storage, ± bytes).

    phase: returns the current phase. `set_kind` sets a storage's kind. Without it, the kind is "buffers" if the storage
    was resized, as FSDP resizes a layer's storage; "activations" if autograd saved it for backward; else "buffers".
    """

    def __init__(self, phase: Callable[[], str]):
        super().__init__()
        self.phase = phase
        self.events: list[Any] = []
        self.flops = 0  # of products and attention; set it to 0 to restart counting
        self.known: dict[int, tuple[weakref.ref, Storage]] = {}
        self.cache: dict[Any, _Cached] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # we do not need this check, which takes as long as everything else

    def __enter__(self) -> Tally:
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor))
        self._contexts.enter_context(_watch_resizes(self._resized))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            key: Any = (func, *map(_signature, args))
            if kwargs:
                key += tuple((name, _signature(value)) for name, value in kwargs.items())
            entry = self.cache.get(key)
        except TypeError:  # not hashable
            key = entry = None
        if entry is None:
            out, entry = self._measure(func, args, kwargs or {}, key)
        elif entry.specs:
            tensors = [empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in entry.specs]
            out = tensors[0] if entry.single else type(entry.container)(tensors)
        elif entry.in_place:
            out = args[0]
        else:
            out = func(*args, **(kwargs or {}))
        if not (entry.in_place or entry.view):
            for tensor in (out,) if isinstance(out, Tensor) else out if type(out) in (list, tuple) else ():
                if tensor is not None:
                    self.storage(tensor)
        if entry.kernel is not None:
            self.flops += entry.flops
            phase = self.phase()
            kernel = entry.phases.get(phase)
            if kernel is None:
                kernel = entry.phases[phase] = replace(entry.kernel, phase=phase)
            self.events.append(kernel)
        return out

    def storage(self, tensor: Tensor) -> Storage:
        """Return the Storage of a tensor, and make it if the tensor's storage is new."""
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        found = self.known.get(key)
        if found is not None:
            return found[1]
        storage = Storage()

        def freed(_: Any) -> None:
            self.known.pop(key, None)
            self._change(storage, -storage.bytes)

        self.known[key] = weakref.ref(untyped, freed), storage
        self._change(storage, untyped.nbytes())
        return storage

    def set_kind(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Set the kind of these tensors' storages, unless it is final. It is final afterwards."""
        for tensor in tensors:
            storage = self.storage(tensor)
            if not storage.final:
                storage.kind, storage.final = kind, True

    def memory(self, since: int = 0) -> tuple[dict[str, int], dict[str, int]]:
        """Return (bytes by kind at the peak since event number `since`, bytes by kind at the end)."""
        now, peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        total = highest = 0
        for number, event in enumerate(self.events):
            if type(event) is tuple:
                storage, change = event
                now[storage.kind] += change
                total += change
            if number >= since and total > highest:
                peak, highest = dict(now), total
        return peak, now

    def _measure(self, func: Any, args: Any, kwargs: Any, key: Any) -> tuple[Any, _Cached]:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in inputs:
            self.storage(tensor)
        before = [_signature(t) for t in inputs]
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            if not any(text in str(error) for text in _NO_DATA):
                raise
            frame = innermost()
            where = f"{frame.f_globals['__name__'].removeprefix('impl.')}, line {frame.f_lineno}: " if frame else ""
            raise NeedsData(
                f"{where}this asks for a tensor's numbers (.item(), .tolist(), bool(…), a mask as index), and "
                "in a dry run it has none: lab.dryrun.host(tensor, balanced=…) reads them, and there gives `balanced`"
            ) from None  # fmt: skip
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        kernel = _kernel(func, args, kwargs, out, inputs, outputs)
        entry = _Cached(kernel, 0 if kernel is None else round(kernel.flops * (0.8 if _recomputes(func) else 1)), {})
        if outputs and all(t.is_meta for t in (*inputs, *outputs)):
            entry.view = kernel is None and func.is_view
            if args and out is args[0]:
                entry.in_place = before == [_signature(t) for t in inputs]
            elif _fresh(inputs, outputs) and (out is outputs[0] or list(out) == outputs):
                entry.single, entry.container = out is outputs[0], None if out is outputs[0] else out[:0]
                entry.specs = [(t.shape, t.stride(), t.dtype) for t in outputs]
        if key is not None:
            self.cache[key] = entry
        return out, entry

    def _saved(self, tensor: Tensor) -> Tensor:
        storage = self.storage(tensor)
        if not storage.final:
            storage.kind = "activations"
        return tensor

    def _resized(self, untyped: torch.UntypedStorage) -> None:
        found = self.known.get(untyped._cdata)
        if found is not None:
            storage = found[1]
            self._change(storage, untyped.nbytes() - storage.bytes)
            if not storage.final:
                storage.kind, storage.final = "buffers", True

    def _change(self, storage: Storage, change: int) -> None:
        if change:
            storage.bytes += change
            self.events.append((storage, change))


@dataclass(slots=True)
class _Cached:
    """The cost of an operator on inputs of given shapes, and how to make its results without calling it."""

    kernel: Compute | None  # None: no kernel runs
    flops: int  # backward of attention counts as 2 forwards, without the recomputation of scores in its kernel
    phases: dict[str, Compute]
    in_place: bool = False  # its result is its first argument
    view: bool = False  # its results share its arguments' memory
    specs: list[tuple] = field(default_factory=list)  # (shape, stride, dtype) of new results; empty: call the operator
    single: bool = True  # whether the result is a single tensor
    container: Any = None  # otherwise an empty list or tuple of the result's type


def _recomputes(func: Any) -> bool:
    return "scaled_dot_product" in func.__name__ and "backward" in func.__name__


def _signature(x: Any) -> Any:
    """Return the properties of an argument that determine the result's shape, without a tensor's numbers."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.is_meta
    if type(x) in (list, tuple):
        return tuple(map(_signature, x))
    return type(x), x  # 1 and 1.0 are equal, but promote dtypes differently


def _fresh(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether each output fills its storage, and shares it with no input."""
    input_storages = {t.untyped_storage()._cdata for t in inputs}
    return all(_fills_storage(t) and t.untyped_storage()._cdata not in input_storages for t in outputs)


def _fills_storage(t: Tensor) -> bool:
    """Whether a tensor fills its whole storage."""
    size = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    return t.storage_offset() == 0 and t.untyped_storage().nbytes() == size * t.element_size()


def _kernel(func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Compute | None:
    if not outputs or is_free(func, inputs, outputs):
        return None
    packet = func._overloadpacket
    shape, batch = None, 1
    if packet in _PRODUCTS:
        a, b = (args[i] for i in _PRODUCTS[packet])
        shape, batch = (a.shape[-2], b.shape[-1], a.shape[-1]), a.shape[0] if a.dim() == 3 else 1
    label = FUSED if "scaled_dot_product" in packet.__name__ else packet.__name__
    dtype = str(operator_dtype(inputs + outputs)).removeprefix("torch.")
    flops, bytes = operator_flops(func, args, kwargs, out), operator_bytes(func, inputs, outputs)
    return Compute(flops, bytes, shape, batch, dtype, "", label)


def _watch_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[Any]:
    """Return a context manager that calls `on_resize` after each resize_ of a storage, which is not an operator."""
    resize = torch.UntypedStorage.resize_

    def call(self: Any, size: int) -> Any:
        out = resize(self, size)
        on_resize(self)
        return out

    return mock.patch.object(torch.UntypedStorage, "resize_", call)
