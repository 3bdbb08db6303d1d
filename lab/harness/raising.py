"""Probes of bad input: records what a call raises, and answers a reference error where a rank raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn


def raised(call: Callable[[], object], text: bool = False) -> str:
    """The name of what `call` raises, with text also what it says; "nothing" where it returns. What is not written yet
    is raised on."""
    try:
        call()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}" if text else type(error).__name__
    return "nothing"


@contextlib.contextmanager
def without_models() -> Iterator[None]:
    """Inside, a model can be counted on paper alone."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("this is counted on paper: from the sizes, without a model")

    with mock.patch.object(nn.Module, "__init__", refuse):
        yield
