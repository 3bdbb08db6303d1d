"""Helpers for probes of bad input: record the exception that a call raises."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn


def raised(call: Callable[[], object], text: bool = False) -> str:
    """The name of the exception that `call` raises; "nothing" if it returns.

    text: append the exception's text. NotImplementedError is raised again: the exercise is not written yet.
    """
    try:
        call()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}" if text else type(error).__name__
    return "nothing"


@contextlib.contextmanager
def without_models() -> Iterator[None]:
    """Raise RuntimeError if the block makes an nn.Module, so that sizes must be computed without a model."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("this is counted on paper: from the sizes, without a model")

    with mock.patch.object(nn.Module, "__init__", refuse):
        yield
