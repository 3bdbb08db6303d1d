# mypy: disable-error-code="assignment,misc,attr-defined,method-assign,return-value,unused-ignore"
"""Fakes what CS336 forks expect of their machine: packages, profiler ranges, torch.compile, and a GPU."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

# Loggers, profilers and launchers: calls into them do nothing.
SILENT = {"wandb", "modal", "nvtx", "viztracer", "tensorboard"}
# Packages that only scripts use: importing works, and calling anything in them raises ModuleNotFoundError.
HOLLOW = {"pandas", "submitit", "seaborn", "plotly", "tiktoken", "regex", "tqdm", "humanfriendly", "tabulate", "fire"}
FORK = str(Path(__file__).resolve().parent.parent)


def find_packages(root: Path) -> None:
    """Let imports find the fork's packages: at uv's source paths, beside cs336_basics, and under changed names."""
    sources = [s.get("path") for s in _table(root / "pyproject.toml", "uv", "sources").values() if isinstance(s, dict)]
    paths = [root / source for source in sources if isinstance(source, str)]
    paths += sorted(p.parent for p in root.rglob("cs336_basics") if p.is_dir())
    folders = [folder for path in paths for folder in (path, path / "src") if folder.resolve().is_relative_to(root)]
    sys.path += dict.fromkeys(map(str, folders))
    renamed: dict[str, Path] = {}
    for file in sorted(root.rglob("pyproject.toml")):
        pairs = [*_table(file, "setuptools", "package-dir").items()]
        for build in (("build",), ("build", "targets", "wheel")):
            for key in ("sources", "force-include"):
                pairs += [(name, folder) for folder, name in _table(file, "hatch", *build, key).items()]
        renamed |= {name: file.parent / folder / "__init__.py" for name, folder in pairs if type(name) is type(folder)}

    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        file = renamed.get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file and file.is_file() else None

    sys.meta_path.append(types.SimpleNamespace(find_spec=find_spec))


def _table(file: Path, *keys: str) -> dict[str, Any]:
    """Return a table below [tool] of a pyproject.toml, or {} if the file has no such table."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]
        for key in keys:
            table = table[key]
    except (OSError, ValueError, KeyError, TypeError):
        table = {}
    return table if isinstance(table, dict) else {}


def supply() -> None:
    """Let a fork load on a machine without these packages, and run on one without a GPU."""
    hollow = {name: ModuleNotFoundError(f"No module named {name!r}", name=name) for name in HOLLOW}
    sys.meta_path.append(Hollow({**dict.fromkeys(SILENT), **hollow}))  # last, so that installed packages win
    if not hasattr(typing, "override"):  # new in Python 3.12
        typing.override = lambda function: function
    torch.compile = _eager  # returns the function unchanged; compiling takes longer than the test
    dist.get_backend = lambda group=None: "gloo"  # the kit's own process group behaves like Gloo
    if not torch.cuda.is_available():
        for name in ("mark", "range_push", "range_pop"):
            setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
        torch.cuda.nvtx.range = _Range
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.Event, torch.cuda.Stream = _Event, _Stream
        torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _Stream()
        torch.cuda.stream = lambda stream: contextlib.nullcontext()
        torch.cuda.set_device = lambda device: None
        torch.cuda.get_device_capability = lambda device=None: (8, 0)
        torch.cuda.get_device_name = lambda device=None: "Triton's interpreter"
        for module in (torch.cuda, torch.cuda.memory):
            for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "ipc_collect"):
                setattr(module, name, lambda device=None: None)
            module.mem_get_info = _host_memory
    if os.environ.get("TRITON_INTERPRET") == "1":
        _first_configuration()
        if not torch.cuda.is_available():
            from triton.runtime import driver

            driver.set_active(_Driver())


def pretend_cuda() -> None:
    """Report to the fork's code that its tensors are on a GPU, because wrappers of Triton kernels often assert that.

    Triton's interpreter runs on CPU tensors. Torch, Triton and the kit still see a CPU.
    """
    if torch.cuda.is_available():
        return
    _FakeGPU().__enter__()
    torch.cuda.is_available = lambda: _called_by_fork()
    torch.cuda.device_count = lambda: int(_called_by_fork())
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: contextlib.nullcontext()


def _called_by_fork() -> bool:
    """Whether code of the fork called our caller."""
    return sys._getframe(2).f_code.co_filename.startswith(FORK)


def _host_memory(device: Any = None) -> tuple[int, int]:
    """Return (free, total) bytes of the host's memory, where the tensors really are."""
    return tuple(os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))


class _FakeGPU(TorchFunctionMode):
    """Reports to the fork that tensors are on a GPU. Tensors that it creates on or moves to a GPU stay on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0) if _called_by_fork() else func(*args)
        if func == torch.Tensor.is_cuda.__get__:
            return _called_by_fork() or func(*args)
        if func == torch.Tensor.get_device:
            return 0 if _called_by_fork() else func(*args)
        if func == torch.Tensor.cuda:
            return args[0]
        if func is torch.device or func is torch._C._nn._parse_to:
            return func(*args, **kwargs)  # these handle device names, not tensors
        if func == torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cuda", *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cuda"
        cpu_kwargs = {name: _on_the_cpu(value) for name, value in kwargs.items()}
        return func(*map(_on_the_cpu, args), **cpu_kwargs)


def _on_the_cpu(value: Any) -> Any:
    """Return the CPU in place of a CUDA device; return anything else unchanged."""
    named = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if named else value


class _Range(contextlib.ContextDecorator, contextlib.nullcontext):
    """An NVTX range that does nothing, usable as a context manager or a decorator."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def wait(self, *args: Any) -> None:
        """Return at once: on the CPU all work is done when its call returns."""

    synchronize = wait_event = wait_stream = wait

    def query(self) -> bool:
        return True


class _Event(_Range):
    """Replaces torch.cuda.Event."""

    at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


class _Stream(_Range):
    cuda_stream = 0

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


class _Driver:
    """Replaces Triton's driver, and provides only the active device."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"0 active drivers: the interpreter has no {name}")


def _eager(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


def _first_configuration() -> None:
    """Make autotuned kernels run their first configuration, because timing is meaningless in the interpreter."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = self.configs[0]
        if first.pre_hook:
            first.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **first.all_kwargs()})
        options = {k: v for k, v in first.all_kwargs().items() if k in self.arg_names}
        return self.fn.run(*args, **kwargs, **options)

    Autotuner.run = run


class _Hollow:
    """An attribute of a missing package. It can be named, subscripted and subclassed, as annotations need."""

    def __init__(self, name: str, error: Exception | None):
        self.name, self.error = name, error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Hollow(f"{self.name}.{name}", self.error)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.error:
            raise self.error
        decorated = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorated else self

    def __instancecheck__(self, instance: Any) -> bool:
        self()
        return False

    def __getitem__(self, item: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type(self.name, (), {"__new__": lambda cls, *args, **kwargs: self()}) if self.error else object,)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None


class Hollow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these modules and their submodules. Using a name of a module raises the module's error, if it has one."""

    def __init__(self, errors: dict[str, Exception | None]):
        self.errors = errors

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        for name, error in self.errors.items():
            if f"{fullname}.".startswith(f"{name}."):
                return importlib.machinery.ModuleSpec(fullname, self, loader_state=error, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        error = module.__spec__.loader_state if module.__spec__ else None

        def __getattr__(name: str) -> Any:
            if name == "__all__" and error:
                raise error  # for `import *`: we cannot know the names
            if name.startswith("__"):
                raise AttributeError(name)
            return _Hollow(f"{module.__name__}.{name}", error)

        module.__dict__["__getattr__"] = __getattr__
