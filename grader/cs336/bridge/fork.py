"""The fork that lies beside this file: its tests/adapters.py, and around it what such code expects of its machine."""

from __future__ import annotations

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
LACKING: dict[str, Exception] = {}  # module or package -> why it does not load

# At the end: nothing of a fork comes before the kit, the standard library or what is installed.
sys.path += [str(HERE / "supplied"), str(HERE)]
supplied = importlib.import_module("cs336_supplied")
supplied.find_packages(HERE)
supplied.supply()
sys.meta_path.insert(0, supplied.Hollow(LACKING))


def adapter(exercise: str, *names: str) -> Callable[..., Any]:
    """The first of these functions that tests/adapters.py has; where it is a stub, the exercise is not written yet."""
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
    """tests/adapters.py. Of a module that it imports and that does not load, each name raises why when it is used."""
    while True:
        try:
            return importlib.import_module(ADAPTERS)
        except SyntaxError as error:
            text = PROJECT.read_text(encoding="utf-8", errors="replace") if PROJECT.is_file() else ""
            asked = re.search(r"requires-python\s*=\s*[\"']\s*>=\s*3\.(\d+)", text)
            if asked and int(asked[1]) > sys.version_info.minor:
                raise RuntimeError(f"needs Python 3.{asked[1]}: {error}") from error
            raise
        except Exception as error:
            name = _broken(error)
            if name in (*LACKING, ADAPTERS, __name__):
                raise
            LACKING[name] = error


def _broken(error: Exception) -> str:
    """The innermost module of the fork that did not load; or the package that adapters.py or an __init__.py lacks."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_name == "<module>"]
    modules = [f.f_globals for f in frames if Path(f.f_code.co_filename).is_relative_to(HERE)] or [globals()]
    name = str(modules[-1]["__name__"])
    if isinstance(error, ModuleNotFoundError) and error.name and (name == ADAPTERS or "__path__" in modules[-1]):
        return error.name
    return name
