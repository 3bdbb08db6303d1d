"""The roofline of each layer: is it bound by arithmetic or by memory, and how long does it take at least?"""

from dataclasses import dataclass

import torch

from lab.model.transformer import Config
from lab.provided import provided

from .flops import flops


@provided
@dataclass(frozen=True)
class Device:
    """Peak rates of a device, in FLOP/s of the dtype that is used and in bytes/s."""

    name: str
    flops_per_s: float
    bytes_per_s: float


@provided
@dataclass(frozen=True)
class Bytes:
    """Bytes that the products of one layer move in one step, over all blocks and the whole batch."""

    forward: int
    backward: int


@provided
@dataclass(frozen=True)
class Bound:
    """One layer in one direction on a device."""

    flops: int
    bytes: int
    intensity: float  # FLOPs a byte
    seconds: float  # it takes at least this long
    by: str  # "compute" or "memory", whichever takes longer


def bytes_moved(config: Config, *, batch: int, context: int, dtype: torch.dtype) -> dict[str, Bytes]:
    """Return the bytes that each layer's matrix products read and write, with the names of `flops`.

    A product of (m, k) and (k, n) reads both factors and writes the result, each once: (mk + kn + mn) elements of
    `dtype`. Attention is plain: keys and values are repeated to `heads`; "scores" writes the whole matrix (batch,
    heads, context, context), masked or not, and "values" reads it. Backward has two products for each product of
    forward, and each of them moves the same three matrices.
    """
    tokens, kv_width = batch * context, config.kv_heads * config.dim

    def linear(rows: int, columns: int) -> int:
        return tokens * rows + rows * columns + tokens * columns

    square = batch * config.heads * (2 * context * config.dim + context**2)
    block = {
        "q_proj": linear(config.width, config.width),
        "k_proj": linear(config.width, kv_width),
        "v_proj": linear(config.width, kv_width),
        "scores": square,
        "values": square,
        "o_proj": linear(config.width, config.width),
        "gate_proj": linear(config.width, config.hidden),
        "up_proj": linear(config.width, config.hidden),
        "down_proj": linear(config.hidden, config.width),
    }
    elements = {name: config.layers * count for name, count in block.items()}
    elements["head"] = linear(config.width, config.vocabulary)
    return {name: Bytes(n * dtype.itemsize, 2 * n * dtype.itemsize) for name, n in elements.items()}


def roofline(
    config: Config, *, batch: int, context: int, dtype: torch.dtype, device: Device
) -> dict[str, dict[str, Bound]]:
    """{layer: {"forward": Bound, "backward": Bound}}, with the names of `flops`.

    A layer takes at least max(FLOPs / peak FLOP/s, bytes / bandwidth) seconds. "compute" is the bound if the first is
    larger, that is, if the layer's intensity (FLOPs per byte) is at least the device's ridge, peak / bandwidth.
    Example: the ridge of an A100 (312 TFLOP/s in bfloat16, 2.039 TB/s) is 153. At batch 8, context 1024, GPT-2's q_proj
    has an intensity of 367 and is bound by compute; its scores, counted half, have 28 and are bound by memory.
    Source: Williams, Waterman, Patterson 2009, "Roofline".
    """
    counted = flops(config, batch=batch, context=context)
    moved = bytes_moved(config, batch=batch, context=context, dtype=dtype)
    return {
        name: {
            direction: _bound(getattr(counted[name], direction), getattr(moved[name], direction), device)
            for direction in ("forward", "backward")
        }
        for name in counted
    }


def mfu(step_flops: float, seconds: float, device: Device) -> float:
    """Return the model FLOPs utilisation: the share of peak FLOP/s that a step reaches, 0 to 1.

    step_flops: FLOPs of the model, forward and backward, without recomputation. seconds: time of the step.
    Example: 312 TFLOP in 2 s on an A100 give 0.5. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    return step_flops / seconds / device.flops_per_s


def _bound(flops: int, bytes: int, device: Device) -> Bound:
    compute, memory = flops / device.flops_per_s, bytes / device.bytes_per_s
    return Bound(flops, bytes, flops / bytes, max(compute, memory), "compute" if compute >= memory else "memory")
