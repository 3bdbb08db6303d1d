"""Lets a program use "cuda" tensors: redirects them to the CPU and marks their storage.

Covered: device arguments of every torch function, `with torch.device("cuda")`, `torch.set_default_device`;
`.cuda()`, `.to()`, `.cpu()` of tensors and modules; `.device`, `.is_cuda`, `.is_cpu`, `.get_device()`. Reads
by the host (`.item()`, `.tolist()`, `.cpu()`, `bool(x)`) wait for the stream. `.numpy()` of a "cuda" tensor
raises TypeError, as on a GPU. Unlike a GPU, one operator may mix "cuda" and CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._device as defaults
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .roofline import is_on_gpu, mark_on_gpu, placing, tensor_bytes
from .streams import CUDA

if TYPE_CHECKING:
    from .device import SimulatedGPU

CPU = torch.device("cpu")


class PlacementMode(TorchFunctionMode):
    """Intercepts every torch function called from Python."""

    def __init__(self, gpu: SimulatedGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in HANDLERS:
            return HANDLERS[func](self.gpu, *args, **kwargs)
        if func is torch.device or func is torch._C._nn._parse_to:  # these do not make a tensor
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):  # useless without a real GPU
            del kwargs["pin_memory"]
        device = _requested_device(func, args, kwargs)
        if device is None:
            return func(*args, **kwargs)
        if device == "cuda":
            args = tuple(CPU if _is_cuda(a) else a for a in args)
            kwargs = {k: CPU if k == "device" or _is_cuda(a) else a for k, a in kwargs.items()}
        with placing(device):
            result = func(*args, **kwargs)
        if device == "cuda":  # torch.tensor(list) calls no operator that would mark its result
            result = tree_map_only(Tensor, mark_on_gpu, result)
        return result


def _requested_device(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the type of the device that a call requests for its result, such as "cuda" or "cpu", or None."""
    device = kwargs.get("device")
    if device is None:
        device = next((a for a in args if isinstance(a, torch.device) or _is_cuda(a)), None)
    if device is None and _is_cuda(defaults.CURRENT_DEVICE) and func in defaults._device_constructors():
        kwargs["device"] = device = CUDA
    if device is None:
        return None
    return "cuda" if _is_cuda(device) or isinstance(device, int) else torch.device(device).type


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, torch.device) and device.type == "cuda"


# ---- methods of tensors ----


def upload(gpu: SimulatedGPU, x: Tensor, non_blocking: bool = False) -> Tensor:
    """x.cuda(): copy x to the GPU over the host's link, or return x if it is already there."""
    if is_on_gpu(x):
        return x
    with placing("cpu"):
        copy = x.clone()
    gpu.transfer(tensor_bytes(x), wait=not non_blocking)
    return mark_on_gpu(copy)


def download(gpu: SimulatedGPU, x: Tensor, non_blocking: bool = False) -> Tensor:
    """x.cpu(): copy x to the host after all work in the stream, or return x if it is already there."""
    if not is_on_gpu(x):
        return x
    gpu.transfer(tensor_bytes(x), wait=not non_blocking)
    with placing("cpu"):
        return x.clone()


def _to(gpu: SimulatedGPU, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x.to(device, dtype, …), x.to(dtype, …), x.to(other, …)."""
    if args and isinstance(args[0], Tensor):
        kwargs["device"], kwargs["dtype"] = _device(gpu, args[0]), args[0].dtype
        names, args = ("non_blocking", "copy"), args[1:]
    elif args and isinstance(args[0], torch.dtype):
        names = ("dtype", "non_blocking", "copy")  # type: ignore[assignment]
    else:
        names = ("device", "dtype", "non_blocking", "copy")  # type: ignore[assignment]
    kwargs.update(zip(names, args, strict=False))
    device, non_blocking = kwargs.pop("device", None), kwargs.get("non_blocking", False)
    moved = x
    if device is not None:
        on_gpu = _is_cuda(device) or isinstance(device, int)
        moved = (upload if on_gpu else download)(gpu, x, non_blocking)
        if not on_gpu and torch.device(device).type != "cpu":
            kwargs["device"] = device  # "meta"
    if moved is not x:
        kwargs.pop("copy", None)  # `moved` is already a copy
    return moved.to(**kwargs) if kwargs else moved


def _device(gpu: SimulatedGPU, x: Tensor) -> torch.device:
    return CUDA if is_on_gpu(x) else x.device


def _as_tensor(gpu: SimulatedGPU, data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor if device is None else _to(gpu, tensor, device)


def _numpy(function: Callable) -> Callable:
    def answer(gpu: SimulatedGPU, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on_gpu(x):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return function(x, *args, **kwargs)

    return answer


def _new(function: Callable) -> Callable:
    """Put x.new_tensor(data) on x's device, unless the call names one."""

    def answer(gpu: SimulatedGPU, x: Tensor, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        result = function(x, *args, **kwargs)
        return mark_on_gpu(result) if (is_on_gpu(x) if device is None else _is_cuda(device)) else result

    return answer


# A function mode receives a property as the `__get__` of its descriptor.
HANDLERS: dict[Any, Callable] = {
    Tensor.device.__get__: _device,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda gpu, x: is_on_gpu(x),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda gpu, x: not is_on_gpu(x) and x.is_cpu,  # type: ignore[attr-defined]
    Tensor.get_device: lambda gpu, x: 0 if is_on_gpu(x) else x.get_device(),
    Tensor.cuda: lambda gpu, x, device=None, non_blocking=False, memory_format=None: upload(gpu, x, non_blocking),
    Tensor.cpu: lambda gpu, x, memory_format=None: download(gpu, x),
    Tensor.to: _to,
    Tensor.tolist: lambda gpu, x: download(gpu, x).tolist(),
    Tensor.numpy: _numpy(Tensor.numpy),
    Tensor.__array__: _numpy(Tensor.__array__),
    Tensor.new_tensor: _new(Tensor.new_tensor),
    torch.as_tensor: _as_tensor,
    torch.asarray: lambda gpu, obj, *, device=None, **kwargs: _to(gpu, torch.asarray(obj, **kwargs), device),
}
