"""Load and store tiles of a (batch, heads, rows, dim) tensor; all attention kernels share these functions."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lab.provided import provided

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x · log2 e), and exp2 is the one instruction there is


@provided
@triton.jit
def load_tile(
    x, strides, b, h, start, rows, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """Return rows start to start + ROWS − 1 of x[b, h] as (ROWS, WIDTH), with zeros beyond `rows` and DIM.

    With TMA, x is a tensor descriptor: the copy engine computes the addresses and masks. Without TMA, x is a pointer
    with four `strides`. INSIDE: all ROWS rows exist, so rows need no mask.
    """
    if TMA:
        tile = x.load([b, h, start, 0]).reshape(ROWS, WIDTH)
    else:
        offs, columns = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        pointers = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        pointers += offs[:, None].to(tl.int64) * strides[2] + columns[None, :].to(tl.int64) * strides[3]
        if INSIDE and DIM == WIDTH:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(offs < rows)[:, None] & (columns < DIM)[None, :], other=0.0)
    return tile


@provided
@triton.jit
def store_tile(
    x, strides, b, h, start, rows, tile, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Store a tile, as `load_tile` loads one, in x's dtype. Nothing is written beyond x."""
    if TMA:
        x.store([b, h, start, 0], tile.to(x.dtype).reshape(1, 1, ROWS, WIDTH))
    else:
        offs, columns = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        pointers = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        pointers += offs[:, None].to(tl.int64) * strides[2] + columns[None, :].to(tl.int64) * strides[3]
        tl.store(pointers, tile.to(x.dtype.element_ty), mask=(offs < rows)[:, None] & (columns < DIM)[None, :])


@provided
def padded(dim: int) -> int:
    """Return the WIDTH of a tile for `dim` columns: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))


@provided
def architecture() -> int:
    """Return the target generation: 90 (Hopper: wgmma), 100 (Blackwell: tcgen05) or 80 (all others)."""
    try:
        generation = int(triton.runtime.driver.active.get_current_target().arch) // 10
    except (RuntimeError, ValueError):  # the interpreter and no GPU; a target that has no number
        generation = 9
    return 10 * generation if generation in (9, 10) else 80


@provided
def fits_tma(*tensors: Tensor) -> bool:
    """Return whether TMA can read all: sm_90 or newer, dense rows, start and other strides multiples of 16 bytes."""

    def fits(x: Tensor) -> bool:
        steps = [stride * x.element_size() for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
        dense = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        return dense and x.numel() > 0 and all(step > 0 and step % 16 == 0 for step in steps[:-1])

    return architecture() >= 90 and all(fits(x) and x.shape[-1] > 1 for x in tensors)


@provided
def operand(x: Tensor, rows: int, tma: bool) -> Any:
    """Return x as a kernel takes it: a descriptor for tiles of `rows` rows, or x itself."""
    if not tma:
        return x
    # A dimension of one has any stride, and nobody uses it: give it one that is allowed.
    strides = [16 if size == 1 else own for size, own in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, padded(x.shape[-1])])
