"""Triton kernels without a GPU, in the interpreter: their launches, loads and stores.

with watching() as seen:  # in a process with TRITON_INTERPRET=1
    o = attention(q, k, v)
seen.launches, seen.operators, seen.rows(k, "load"), seen.races()
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .memory import Observer


class OutOfBounds(IndexError):
    """A program accessed memory outside its tensors. On a GPU it might crash, or read another tensor's numbers."""


class NotTriton(TypeError):
    """A kernel calls a Python function."""


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of one program: its byte addresses, sorted, without masked elements."""

    launch: int  # number of the launch, from 0
    program: tuple[int, int, int]
    kind: str  # "load", "store" or "atomic"
    addresses: np.ndarray


@dataclass(frozen=True)
class Launch:
    kernel: str
    source: str  # a digest of the kernel's text
    grid: tuple[int, ...]
    settings: str  # numbers and flags among its arguments (`settings`)


@dataclass
class Watch:
    """Launches, operators and memory accesses that `watching` has recorded."""

    keep: bool = False  # whether to record every access, or only to check its bounds
    launches: list[Launch] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)  # torch's operators outside launches
    accesses: list[Access] = field(default_factory=list)
    atomics: int = 0
    largest: int = 0  # elements of the largest tensor that a program has held
    storages: list[tuple[int, int]] = field(default_factory=list)  # first and last byte of the launch's tensors
    after: list[Tensor] = field(default_factory=list)  # copies of each launch's tensors at its end, with `keep`

    def touched(self, *kinds: str) -> set[int]:
        """Return all addresses that accesses of these kinds touched."""
        return set(_union(a for a in self.accesses if a.kind in kinds).tolist())

    def races(self) -> int:
        """Return the number of addresses that one program stores and another loads or stores, in any order."""
        found = 0
        for launch in range(len(self.launches)):
            accesses = [a for a in self.accesses if a.launch == launch and a.kind != "atomic"]
            stored = {
                p: _union(a for a in accesses if a.program == p and a.kind == "store")
                for p in {a.program for a in accesses}
            }
            every, counts = np.unique(np.concatenate([*stored.values(), _NOTHING]), return_counts=True)
            found += int((counts > 1).sum())  # stored by several programs
            for program in stored:
                loaded = _union(a for a in accesses if a.program == program and a.kind == "load")
                found += np.intersect1d(loaded, np.setdiff1d(every, stored[program])).size
        return found

    def left(self, x: Tensor) -> bool:
        """Whether x equals one of a launch's tensors at its end, perhaps cast to another dtype."""
        left = (t.reshape(x.shape).to(x.dtype) for t in self.after if t.numel() == x.numel())
        return any(torch.allclose(t, x, rtol=0.0, atol=0.0, equal_nan=True) for t in left)

    def rows(self, x: Tensor, kind: str) -> list[tuple[int, tuple[int, int, int], list[int], set[int]]]:
        """Return (launch, program, [i, j …], rows of x[i, j …]) per access to x, of shape (…, rows, columns).

        An access that touches several matrices of x is listed once per matrix.
        """
        found = []
        indices = _indices(x)
        for access in self.accesses:
            if access.kind != kind:
                continue
            matrices: dict[tuple[int, ...], set[int]] = {}
            for address in access.addresses.tolist():
                if (index := indices.get(address)) is not None:
                    matrices.setdefault(index[:-1], set()).add(index[-1])
            found += [(access.launch, access.program, [*m], rows) for m, rows in matrices.items()]
        return found


_NOTHING = np.empty(0, dtype=np.uint64)


def _union(accesses: Any) -> np.ndarray:
    return np.unique(np.concatenate([*(a.addresses for a in accesses), _NOTHING]))


def addresses(x: Tensor) -> Tensor:
    """Return the address of each element's first byte, int64, in the shape of x."""
    offsets = torch.zeros((), dtype=torch.int64)
    for dim, (length, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        offsets = offsets + (torch.arange(length) * stride).view([length if d == dim else 1 for d in range(x.ndim)])
    return x.data_ptr() + offsets * x.element_size()


def _indices(x: Tensor) -> dict[int, tuple[int, ...]]:
    """Return {address: index (…, row)} of every element of x."""
    return dict(zip(addresses(x).flatten().tolist(), (i[:-1] for i in np.ndindex(*x.shape)), strict=True))


@contextlib.contextmanager
def watching(keep: bool = False) -> Iterator[Watch]:
    """Record interpreted kernels. keep: also record every access. Raises OutOfBounds if a kernel leaves its tensors.

    For kernels that run on a GPU, record launches and operators, but no accesses.
    """
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    seen = Watch(keep)
    builder = interpreter.interpreter_builder
    real = {name: getattr(builder, name) for name in _MEMORY}
    interpret, launch = interpreter.GridExecutor.__call__, JITFunction.run

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, seen.storages = seen.storages, _storages((*args, *kwargs.values()))
        function = getattr(self.fn, "__wrapped__", self.fn)
        launch = Launch(self.fn.__name__, digest(function), _grid(self.grid, {**kwargs}), settings(args, kwargs))
        seen.launches.append(launch)
        with _disable_current_modes():
            try:
                return interpret(self, *args, **kwargs)
            finally:
                seen.storages = outer
                seen.after += [t.clone() for t in _tensors((*args, *kwargs.values())) if keep]

    def launched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            arguments = settings(args, kwargs)
            seen.launches.append(Launch(self.fn.__name__, digest(self.fn), _grid(grid, kwargs), arguments))
        with _disable_current_modes():
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    def recording(name: str) -> Any:
        kind = _MEMORY[name]

        def access(*args: Any, **kwargs: Any) -> Any:
            pointers = args[1] if name == "create_atomic_rmw" else args[0]
            mask = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}.get(name)
            _record(seen, builder, kind, pointers.data, args[mask].data if mask else None)
            return real[name](*args, **kwargs)

        return access

    def post_init(handle: Any) -> None:
        seen.largest = max(seen.largest, handle.data.size)
        real_post_init(handle)

    real_post_init = interpreter.TensorHandle.__post_init__
    with (
        mock.patch.object(interpreter.TensorHandle, "__post_init__", post_init),
        mock.patch.object(interpreter.GridExecutor, "__call__", interpreted),
        mock.patch.object(JITFunction, "run", launched),
        mock.patch.multiple(builder, **{name: recording(name) for name in _MEMORY}),
        Observer(lambda func, *_: seen.operators.append(func.overloadpacket.__name__)),
    ):
        yield seen


_MEMORY = {
    "create_masked_load": "load", "create_masked_store": "store",
    "create_atomic_rmw": "atomic", "create_atomic_cas": "atomic",
}  # fmt: skip


def _record(seen: Watch, builder: Any, kind: str, pointers: np.ndarray, mask: np.ndarray | None) -> None:
    """Check an access, and record it if `keep` is set. Raises OutOfBounds if it leaves the tensors."""
    chosen = pointers if mask is None else pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
    if kind == "atomic":
        seen.atomics += 1
    if not chosen.size:
        return
    low, high = int(chosen.min()), int(chosen.max())
    if not any(first <= low and high <= last for first, last in seen.storages) and not _each_inside(
        chosen, seen.storages
    ):
        raise OutOfBounds(
            f"program {builder.grid_idx} of {seen.launches[-1].kernel}: a {kind} leaves the tensors that the kernel "
            f"was given; mask what lies beyond their edges, also an index below 0, and use each tensor's own strides"
            f"{_leaving_axis(pointers, mask, seen.storages)}"
        )
    if seen.keep:
        addresses = np.unique(chosen.astype(np.uint64))
        seen.accesses.append(Access(len(seen.launches) - 1, tuple(builder.grid_idx), kind, addresses))


def _leaving_axis(pointers: np.ndarray, mask: np.ndarray | None, storages: list[tuple[int, int]]) -> str:
    """Describe the axis of a tile along which the access leaves the tensors; return "" if no single axis does."""
    if pointers.ndim < 2:
        return ""
    allowed = np.ones(pointers.shape, bool) if mask is None else np.broadcast_to(mask, pointers.shape).astype(bool)
    outside = next(
        i for i in zip(*np.nonzero(allowed), strict=True) if not _each_inside(np.asarray(pointers[i]), storages)
    )
    for axis in reversed(range(pointers.ndim)):
        start = (*outside[:axis], 0, *outside[axis + 1 :])
        if _each_inside(np.asarray(pointers[start]), storages):
            return f" (along axis {axis} of the tile, from index {outside[axis]} on)"
    return ""


def _each_inside(addresses: np.ndarray, storages: list[tuple[int, int]]) -> bool:
    inside = np.zeros(addresses.shape, dtype=bool)
    for first, last in storages:
        inside |= (addresses >= first) & (addresses <= last)
    return bool(inside.all())


def _storages(arguments: Any) -> list[tuple[int, int]]:
    storages = [x.untyped_storage() for x in _tensors(arguments)]
    return [(s.data_ptr(), s.data_ptr() + s.nbytes() - 1) for s in storages if s.nbytes()]


def _tensors(arguments: Any) -> list[Tensor]:
    found = []
    for x in arguments:
        x = getattr(x, "base", x)  # the tensor of a tensor descriptor
        found += [x] if isinstance(x, Tensor) else _tensors(x) if isinstance(x, tuple) else []
    return found


def _grid(grid: Any, arguments: dict) -> tuple[int, ...]:
    if callable(grid):
        with contextlib.suppress(Exception):
            return tuple(int(n) for n in grid(arguments))
        return ()
    return tuple(int(n) for n in grid)


def settings(arguments: tuple, keywords: dict[str, Any]) -> str:
    """Return the numbers and flags of a launch: positional, then by keyword, without Triton's own options."""
    plain = (int, float, bool, str)
    named = {name: x for name, x in sorted(keywords.items()) if isinstance(x, plain) and not name.startswith("num_")}
    return f"{[x for x in arguments if isinstance(x, plain)]} {named}"


def digest(function: Any) -> str:
    """Return a digest of a kernel's source and of the functions it calls, equal in all processes.

    Raises NotTriton if the kernel calls a Python function: the interpreter would run it, but Triton cannot compile it.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import DependenciesFinder, JITCallable

    class Calls(DependenciesFinder):
        def record_reference(self, val: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(val, (InterpretedFunction, JITCallable)):
                self.hasher.update(digest(val.fn).encode())
                return
            try:
                super().record_reference(val, *args, **kwargs)
            except RuntimeError:
                raise NotTriton(
                    f"{function.__name__} calls {getattr(val, '__name__', val)}, which is no function of Triton's: a "
                    "kernel can call triton.language and functions with @triton.jit, for anything else it would not "
                    "compile for a GPU"
                ) from None

    source = JITCallable(function)
    calls = Calls(function.__name__, function.__globals__, inspect.getclosurevars(function).nonlocals, source.src)
    calls.visit(source.parse())
    return str(calls.ret[:16])
