"""Refuses library operators that would be the answer itself, in torch's dispatcher.

Every name, alias, overload, mode and compiled graph ends in the dispatcher, and Python code cannot undo a kernel that
we replace there. Two kinds of calls escape: native code that bypasses the dispatcher, which lab.ranks.watch refuses,
and operators whose names do not contain the words of a forbidden name.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.library

from ..solution.forbidden import ForbiddenCall

# {dispatch key whose kernels compute: key by which torch looks such a kernel up}. Kernels of other keys, such as
# Autograd, call these kernels.
_KEYS = {
    "CPU": "CPU", "CUDA": "CUDA", "CompositeImplicitAutograd": "CPU", "CompositeExplicitAutograd": "CPU",
    "CompositeExplicitAutogradNonFunctional": "CPU", "NestedTensorCPU": "NestedTensorCPU",
    "NestedTensorCUDA": "NestedTensorCUDA", "CompositeImplicitAutogradNestedTensor": "NestedTensorCPU",
}  # fmt: skip
_NO_OPERATORS = ("torch.distributed.", "torch.nn.parallel.", "torch.nn.utils")


def refuse(names: tuple[str, ...], refused: Callable[[], bool]) -> None:
    """Make the operators of these names raise ForbiddenCall whenever `refused()` is true, until this process ends."""
    library = torch._C._dispatch_library("IMPL", "aten", "")
    with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is replaced
        for operator, key, kernel in kernels(names):
            refusal = _refusal(operator, kernel, refused, library)
            library.impl(operator.removeprefix("aten::"), key, refusal, True)  # type: ignore[call-arg]


@functools.cache
def kernels(names: tuple[str, ...]) -> list[tuple[str, str, Any]]:
    """Return what `refuse` replaces: (operator, dispatch key, kernel). The zygote calls this before it forks."""
    return [
        (operator, key, torch.library.get_kernel(operator, lookup_key))
        for operator in matching(names)
        for key, lookup_key in _KEYS.items()
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    ]


def matching(names: Iterable[str]) -> list[str]:
    """Return operators, such as "aten::_fused_rms_norm", whose names contain all words of one of `names`, in order."""
    stems = {n: n.rpartition(".")[2].strip("_") for n in names if not n.startswith(_NO_OPERATORS)}
    selected = sorted({stem for n, stem in stems.items() if "_" in stem or "torch.nn." in n})  # no other single words
    if not selected:
        return []  # do not list thousands of operators for nothing
    pattern = re.compile("|".join(f"(?:.*_)?{'_(?:.*_)?'.join(n.split('_'))}(?:_.*)?" for n in selected))
    known = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name for name in known if pattern.fullmatch(name[6:].partition(".")[0])]


def _refusal(operator: str, kernel: Any, refused: Callable[[], bool], library: Any) -> Any:
    def wrapper(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if refused():
            raise ForbiddenCall(f"torch.ops.{operator.replace('::', '.')} is forbidden: it would be the answer itself")
        return kernel.call_boxed(keys, *args, **kwargs)

    wrapper.library = library  # type: ignore[attr-defined]  # keep the library alive: it removes its kernels when freed
    return wrapper
