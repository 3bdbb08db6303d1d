"""Probes for many exercises: call a function of the implementation, and record what it returns, raises, allocates."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from torch import Tensor

from ..measure.memory import meter
from .callers import CallerTensors
from .raising import raised


def called(impl: Any, function: str, cases: list) -> list:
    """Call `function`, "impl.stage.module.name", for each case: a list of arguments, or a dict by name.

    Returns the result of each case; if the call changed an argument, {"callers": …} instead.
    """
    found = []
    for case in cases:
        arguments = CallerTensors(
            **(case if isinstance(case, dict) else {f"argument {i}": x for i, x in enumerate(case, 1)})
        )
        result = plain(_call(impl, function, case))
        found.append({"callers": seen} if any(seen := arguments.seen()) else result)
    return found


def refused(impl: Any, function: str, cases: list) -> list[str]:
    """For each case, the name of the exception that `function` raises; "nothing" if it returns."""
    return [raised(functools.partial(_call, impl, function, case)) for case in cases]


def metered(impl: Any, function: str, case: list, gradients: int = 0) -> dict:
    """Return what torch's dispatcher measures of one call's memory. Tensors in case[:gradients] require gradients."""
    tensors = [x.requires_grad_(i < gradients) for i, x in enumerate(case) if hasattr(x, "requires_grad_")]
    with meter(inputs=tensors) as measured:
        _call(impl, function, case)
    return measured.plain()


def plain(value: Any) -> Any:
    """Convert a value to plain types: dataclasses to dicts, arrays to lists, scalar tensors to numbers."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, Tensor) and not value.ndim else value


def _call(impl: Any, function: str, case: Any) -> Any:
    call: Callable[..., Any] = operator.attrgetter(function.removeprefix("impl."))(impl)
    return call(**case) if isinstance(case, dict) else call(*case)
