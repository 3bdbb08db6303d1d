"""Loads an implementation (student, reference, a path, a submission) as the package `impl`.

`impl.ddp.naive` is imported on first access, so a file that does not load fails only its own exercise. An object can be
*replaced*: after its module has executed, and before other modules import from it, its name is rebound to a stand-in.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..course.assignment import ROOT

NAME = "impl"


class ImplementationNotFound(FileNotFoundError):
    """A module of the implementation has no file."""


def folder_of(name: str) -> Path:
    """The folder of an implementation. name: as for --impl."""
    return ROOT / name if name in ("student", "reference") else Path(name)


def load(path: str | Path, replace: Mapping[str, Callable[[ModuleType], Any]] | None = None) -> ModuleType:
    """Load the implementation in folder `path` as package `impl`; its modules load on first attribute access.

    replace: {"ddp/naive.py:NaiveDDP": function}; the function takes the executed module and returns the stand-in.
    """
    unload()
    finder = _Finder(Path(path).resolve(), dict(replace or {}))
    sys.meta_path.insert(0, finder)
    return importlib.import_module(NAME)


def unload() -> None:
    """Forget the implementation, so that the next `load` starts from its files."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        return  # without this, a forked child would read all module names, and so copy their memory pages
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
    for name in [n for n in sys.modules if n == NAME or n.startswith(f"{NAME}.")]:
        del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, root: Path, replace: dict[str, Callable[[ModuleType], Any]]):
        self.root, self.replace = root, replace

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        base = self.root.joinpath(*fullname.split(".")[1:])
        folders = [str(base)] if base.is_dir() else None
        file = base / "__init__.py" if folders else base.with_suffix(".py")
        if not (folders or file.is_file()):
            return None
        changes = {o.partition(":")[2]: f for o, f in self.replace.items() if self.root / o.partition(":")[0] == file}
        loader = _Loader(fullname, str(file), changes)
        spec: Any = importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=folders
        )
        spec.has_location = file.is_file()
        return spec


def _import_on_access(module: ModuleType) -> None:
    """Import submodules, such as `impl.ddp.naive`, on first access."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{module.__name__}.{name}"
        if importlib.util.find_spec(full) is None:
            relative = full.partition(".")[2].replace(".", "/")
            raise ImplementationNotFound(
                f"{relative}.py is missing: it should be beside the other exercises, at least as a stub"
            )
        return importlib.import_module(full)

    module.__dict__.setdefault("__getattr__", __getattr__)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file, or a folder's __init__.py. A student may hand in folders without an __init__.py."""

    def __init__(self, fullname: str, path: str, changes: dict[str, Callable[[ModuleType], Any]]):
        super().__init__(fullname, path)
        self.changes = changes

    def get_code(self, fullname: str) -> Any:
        if not Path(self.path).is_file():
            return compile("", self.path, "exec")
        return super().get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except BaseException as error:  # mark the error as a failed import, not a wrong result
            error.while_loading = module.__name__  # type: ignore[attr-defined]
            raise
        if hasattr(module, "__path__"):
            _import_on_access(module)
        for name, stand_in in self.changes.items():
            setattr(module, name, stand_in(module))
