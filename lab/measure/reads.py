"""Finds calls in which the host reads a tensor's value, and so would wait for a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .memory import Observer
from .roofline import needs_the_value

_OPS = {  # {name in the dispatcher: usual name}
    "_local_scalar_dense": "a number read: .item(), float(), bool() or if",
    "_unique2": "unique",
    "index": "a mask as index",  # the host must know the number of true entries
}
# These methods read values without an operator: on a CPU they only access memory.
_CALLS = {
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "numpy.asarray",
    Tensor.__dlpack__: "__dlpack__",
    Tensor.cpu: ".cpu()",
    Tensor.__repr__: "repr",
    Tensor.__format__: "format",
    Tensor.data_ptr: "data_ptr",
    Tensor.untyped_storage: "untyped_storage",
}
AS_MEMORY = {".numpy()", "numpy.asarray", "__dlpack__", "data_ptr", "untyped_storage"}  # without an operator
_FACTORIES = (torch.tensor, torch.as_tensor, torch.asarray)


@contextlib.contextmanager
def reads() -> Iterator[set[str]]:
    """Yield a set that collects the names of calls inside the block that read a tensor's value."""
    found: set[str] = set()

    def see(func: Any, out: Any, args: Any, kwargs: Any) -> None:
        if needs_the_value(func, args):
            name = func.overloadpacket.__name__
            found.add(_OPS.get(name, name))

    with _Calls(found), Observer(see):
        yield found


class _Calls(TorchFunctionMode):
    def __init__(self, found: set[str]):
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CALLS:
            self.found.add(_CALLS[func])
        elif func is Tensor.to and "cpu" in (*args[1:], kwargs.get("device")):  # only the string "cpu"
            self.found.add('.to("cpu")')
        elif func in _FACTORIES and type(args[0]) in (list, tuple) and any(map(torch.is_tensor, tree_leaves(args[0]))):
            self.found.add("a tensor made of others, number by number")
        return func(*args, **kwargs)
