"""The cost of a torch operator on a device: the roofline, max(FLOPs / peak, bytes / bandwidth).

FLOPs are those of matrix products, convolutions and attention, by torch.utils.flop_counter (a multiply-add is 2 FLOPs;
causal attention counts half). Bytes: each input is read once and each output written once; a view moves no bytes.
Source: Williams, Waterman, Patterson 2009, "Roofline".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from .device import SimulatedGPU

aten = torch.ops.aten


@dataclass(frozen=True)
class Device:
    """Peak rates of a device. Defaults: NVIDIA A100 80GB SXM, data sheet of 2021, dense."""

    name: str = "Simulated A100-SXM4-80GB"
    flops_per_s: dict[torch.dtype, float] = field(
        default_factory=lambda: {
            torch.bfloat16: 312e12,
            torch.float16: 312e12,
            torch.float32: 19.5e12,  # without TF32, as is torch's default
            torch.float64: 19.5e12,
        }
    )
    bytes_per_s: float = 2.039e12
    host_bytes_per_s: float = 32e9  # PCIe gen 4 x16, one direction
    memory_bytes: int = 80 * 2**30
    capability: tuple[int, int] = (8, 0)
    multiprocessors: int = 108


A100 = Device()


def operator_seconds(device: Device, flops: float, bytes: float, dtype: torch.dtype) -> float:
    """Return the seconds by the roofline: arithmetic or memory traffic, whichever takes longer."""
    peak = device.flops_per_s.get(dtype, device.flops_per_s[torch.float32])
    return max(flops / peak, bytes / device.bytes_per_s)


class RooflineMode(TorchDispatchMode):
    """Queues the seconds of operators on "cuda" tensors on the current stream of a simulated GPU, also in backward.

    All tensors are on the CPU. The storages of "cuda" tensors have a mark.
    """

    def __init__(self, gpu: SimulatedGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # inference_mode passes composite operators undecomposed
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._charge(func, args, kwargs, result)
        return result

    def _charge(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if func is aten.copy_.default and is_on_gpu(args[0]) != is_on_gpu(args[1]):
            return self.gpu.transfer(tensor_bytes(args[1]), wait=not (len(args) > 2 and args[2]))
        if not (placed == "cuda" or (placed is None and any(map(is_on_gpu, inputs)))):
            return
        if not func._schema.is_mutable:
            for t in outputs:
                mark_on_gpu(t)
        if not is_free(func, inputs, outputs):
            flops, dtype = operator_flops(func, args, kwargs, result), operator_dtype(inputs + outputs)
            bytes = operator_bytes(func, inputs, outputs)
            self.gpu.launch(operator_seconds(self.gpu.device, flops, bytes, dtype))
        if needs_the_value(func, args):
            self.gpu.stream.synchronize()


# ---- device of a tensor: the storage of a "cuda" tensor has a mark ----

placed: str | None = None  # device of the current call's result: "cuda", "cpu", or None (the device of its inputs)


@contextmanager
def placing(device: str | None) -> Iterator[None]:
    """Put results on `device` ("cuda" or "cpu") inside the block."""
    global placed
    outer, placed = placed, device
    try:
        yield
    finally:
        placed = outer


def mark_on_gpu(tensor: Tensor) -> Tensor:
    """Mark this tensor, and all its views, as being on the simulated GPU."""
    if tensor.layout is torch.strided:
        tensor.untyped_storage().on_simulated_gpu = True  # type: ignore[attr-defined]
    return tensor


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is on the simulated GPU."""
    return tensor.layout is torch.strided and hasattr(tensor.untyped_storage(), "on_simulated_gpu")


# ---- the cost of one operator ----

_ALLOCATIONS = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.resize_,
}  # fmt: skip
_LOOKUPS = {aten.embedding, aten.index_select, aten.gather, aten.index}  # read only what they return
_FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def is_free(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether no kernel runs, as for allocations, views, and queries such as sizes."""
    if func._overloadpacket in _ALLOCATIONS:
        return True
    if func._schema.is_mutable:
        return False
    read = {t.untyped_storage()._cdata for t in inputs if t.layout is torch.strided}
    return all(t.layout is torch.strided and t.untyped_storage()._cdata in read for t in outputs)


def needs_the_value(func: Any, args: Any) -> bool:
    """Whether the host must wait for the result, as for .item(), nonzero(), or a mask as index."""
    if func._overloadpacket is aten.index:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def operator_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of an operator: 2 per multiply-add, half if causal, 0 without a formula."""
    formula = _FLOPS.get(func._overloadpacket)
    if formula is None:
        return 0.0
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return formula(*args, **kwargs, out_val=result) * (0.5 if named.get("is_causal") else 1.0)


def operator_bytes(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Return bytes moved: each input read once, each output written once. A lookup reads only the rows it returns."""
    read = {id(t): t for t in inputs}
    if func._overloadpacket in _LOOKUPS and inputs:
        read.pop(id(inputs[0]))
        read.update({-1 - i: t for i, t in enumerate(outputs)})
    return sum(map(tensor_bytes, read.values())) + sum(map(tensor_bytes, outputs))


def tensor_bytes(t: Tensor) -> int:
    """Return a tensor's bytes of memory. An expanded tensor has less memory than its elements suggest."""
    bytes = t.numel() * t.element_size()
    return min(bytes, t.untyped_storage().nbytes()) if t.layout is torch.strided else bytes


def operator_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the first floating-point dtype of the tensors, which determines the peak rate; float32 if none has one."""
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
