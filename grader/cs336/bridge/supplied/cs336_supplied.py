"""What CS336 forks expect of their machine and an exercise can do without, supplied: imports, ranges, compilation."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from typing import Any

import torch
import torch.distributed as dist

# Loggers, profilers and launchers: whatever is called in them, nothing happens.
SILENT = {"wandb", "modal", "nvtx", "viztracer", "tensorboard"}
# Of use to scripts alone: they can be imported, and say their name when something in them is called.
HOLLOW = {"pandas", "submitit", "seaborn", "plotly", "tiktoken", "regex", "tqdm", "humanfriendly", "tabulate", "fire"}


def supply() -> None:
    """Let a fork load on a machine without these packages, and run on one without a GPU."""
    sys.meta_path.append(_Finder())  # last: what is installed is found first
    if not hasattr(typing, "override"):  # Python 3.12's
        typing.override = lambda function: function  # type: ignore[attr-defined]
    torch.compile = _eager  # type: ignore[assignment]  # the same function; compiling takes longer than the test
    dist.get_backend = lambda group=None: "gloo"  # type: ignore[assignment, return-value]  # what carries the kit's own group
    if not torch.cuda.is_available():
        for name in ("mark", "range_push", "range_pop"):
            setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
        torch.cuda.nvtx.range = _Range  # type: ignore[assignment]
        torch.cuda.synchronize = lambda device=None: None
    if os.environ.get("TRITON_INTERPRET") == "1":
        _first_configuration()


def call_it_cuda() -> None:
    """Let CPU tensors pass the check `x.is_cuda`, which wrappers of kernels make: the interpreter takes them."""
    if not torch.cuda.is_available():
        torch.Tensor.is_cuda = True  # type: ignore[assignment, misc]


class _Range(contextlib.ContextDecorator, contextlib.nullcontext):
    """A range that nobody profiles, as a context or a decorator."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()


def _eager(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


def _first_configuration() -> None:
    """An autotuned kernel runs its first configuration: the interpreter has no clock to choose by."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = self.configs[0]
        if first.pre_hook:
            first.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **first.all_kwargs()})
        options = {k: v for k, v in first.all_kwargs().items() if k in self.arg_names}
        return self.fn.run(*args, **kwargs, **options)

    Autotuner.run = run  # type: ignore[method-assign]


class _Hollow:
    """Something of a package that is not there. It can be named, subscripted and subclassed, as annotations do."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Hollow(f"{self.name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package = self.name.partition(".")[0]
        if package not in SILENT:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        decorated = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorated else self

    def __getitem__(self, item: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in SILENT | HOLLOW:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Hollow(f"{module.__name__}.{name}")

        module.__dict__["__getattr__"] = __getattr__
