"""An attention function that the user names on the command line: `--peer path:function`."""

import argparse
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path


def forward_of(text: str) -> tuple[str, Callable]:
    """Return (name, function) for a text `path:function`."""
    path, _, name = text.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise argparse.ArgumentTypeError(f"expected path:function with the path of a Python file, got {text!r}")
    package = types.ModuleType(f"peer{len(sys.modules)}")  # so that the file can import files next to it
    package.__path__ = [str(file.parents[1])]
    sys.modules[package.__name__] = package
    module = importlib.import_module(f"{package.__name__}.{file.parent.name}.{file.stem}")
    if not callable(getattr(module, name, None)):
        raise argparse.ArgumentTypeError(f"expected a function in {path}, and it has no {name!r}")
    return name, getattr(module, name)


PEER = {  # the option --peer, which may be repeated
    "action": "append", "default": [], "metavar": "path:function", "type": forward_of,
    "help": "another forward, called as `attention_forward` is: (q, k, v, is_causal)",
}  # fmt: skip
