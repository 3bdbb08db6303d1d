"""Refuses library operators that would be the answer itself, where torch dispatches them.

Below every name, alias, overload, mode and compiled graph: what replaces a kernel there cannot be switched off from
Python. Not seen is what does not pass the dispatcher, native code of one's own, which lab.ranks.watch does not let in;
nor an operator whose name shares no two words with what is forbidden.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.library

from ..solution.forbidden import ForbiddenCall

# Where an operator has kernels that compute, and where such a kernel is found. Autograd's and others hand on to these.
_KEYS = {
    "CPU": "CPU", "CUDA": "CUDA", "CompositeImplicitAutograd": "CPU", "CompositeExplicitAutograd": "CPU",
    "CompositeExplicitAutogradNonFunctional": "CPU", "NestedTensorCPU": "NestedTensorCPU",
    "NestedTensorCUDA": "NestedTensorCUDA", "CompositeImplicitAutogradNestedTensor": "NestedTensorCPU",
}  # fmt: skip
_NO_OPERATORS = ("torch.distributed.", "torch.nn.parallel.", "torch.nn.utils")


def refuse(names: Iterable[str], asks: Callable[[], bool]) -> None:
    """In this process, from now on: the operators of these names raise ForbiddenCall if `asks()`, else do as ever."""
    library = torch._C._dispatch_library("IMPL", "aten", "")
    for operator in matching(names):
        for key in _KEYS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
                with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
                    refusal = _refusal(operator, key, asks, library)
                    library.impl(operator.removeprefix("aten::"), key, refusal, True)  # type: ignore[call-arg]


def matching(names: Iterable[str]) -> list[str]:
    """The operators, "aten::_fused_rms_norm", whose names hold all words of one of these, in order."""
    ends = {n: n.rpartition(".")[2].strip("_") for n in names if not n.startswith(_NO_OPERATORS)}
    last = sorted({end for n, end in ends.items() if "_" in end or "torch.nn." in n})  # there a single word is enough
    if not last:
        return []  # thousands need not be listed
    wanted = re.compile("|".join(f"(?:.*_)?{'_(?:.*_)?'.join(n.split('_'))}(?:_.*)?" for n in last))
    known = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name for name in known if wanted.fullmatch(name[6:].partition(".")[0])]


def _refusal(operator: str, key: str, asks: Callable[[], bool], library: Any) -> Any:
    kernel = torch.library.get_kernel(operator, _KEYS[key])

    def called(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if asks():
            raise ForbiddenCall(f"torch.ops.{operator.replace('::', '.')} is forbidden: it would be the answer itself")
        return kernel.call_boxed(keys, *args, **kwargs)

    called.library = library  # type: ignore[attr-defined]  # which would take its kernels along if nobody held it
    return called
