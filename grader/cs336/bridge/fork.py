"""Loads tests/adapters.py of the fork beside this file, and fakes packages that this machine lacks."""

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE / "pyproject.toml"
ADAPTERS = f"{__package__}.tests.adapters"
MISSING: dict[str, Exception] = {}  # module or package -> why it does not load

# At the end, so that a fork cannot shadow the kit, the standard library or installed packages.
sys.path += [str(HERE / "supplied"), str(HERE)]
supplied = importlib.import_module("cs336_supplied")
supplied.find_packages(HERE)
supplied.supply()
sys.meta_path.insert(0, supplied.Hollow(MISSING))


def adapter(exercise: str, *names: str) -> Callable[..., Any]:
    """Return the first of these functions in tests/adapters.py; a missing one or a stub raises NotImplementedError."""
    adapters = _adapters()
    found = next((getattr(adapters, n) for n in names if hasattr(adapters, n)), None)
    if found is None:
        raise NotImplementedError(f"{exercise}: tests/adapters.py has no {' or '.join(names)}")

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(f"{exercise}: {found.__name__} is not written yet") from error

    return call


def _adapters() -> Any:
    """Import tests/adapters.py. If a module that it imports does not load, its names raise that error when used."""
    while True:
        try:
            return importlib.import_module(ADAPTERS)
        except SyntaxError as error:
            text = PROJECT.read_text(encoding="utf-8", errors="replace") if PROJECT.is_file() else ""
            required = re.search(r"requires-python\s*=\s*[\"']\s*>=\s*3\.(\d+)", text)
            if required and int(required[1]) > sys.version_info.minor:
                raise RuntimeError(f"needs Python 3.{required[1]}: {error}") from error
            raise
        except Exception as error:
            name = _broken_module(error)
            if name in (*MISSING, ADAPTERS, __name__):
                raise
            MISSING[name] = error


def _broken_module(error: Exception) -> str:
    """Return the fork's innermost module that did not load, or the package that adapters.py or an __init__ lacks."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_name == "<module>"]
    modules = [f.f_globals for f in frames if Path(f.f_code.co_filename).is_relative_to(HERE)] or [globals()]
    name = str(modules[-1]["__name__"])
    if isinstance(error, ModuleNotFoundError) and error.name and (name == ADAPTERS or "__path__" in modules[-1]):
        return error.name
    return name
