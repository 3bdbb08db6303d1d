"""Memory layouts of operands. Each operand gets another layout, to catch code that uses another operand's strides."""

import ctypes
import mmap
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor

from .diagnose import LOOKS, harmless
from .rng import Rng

T = TypeVar("T")

ALIGNED = ["contiguous", "heads inside", "rows apart"]  # layouts that tensor descriptors support
# Layout -> function of a tensor, and of a value that fills gaps between its elements. DIFFERENT ones differ in strides.
LAYOUTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "odd offset": lambda x, fill: x.new_full((x.numel() + 1,), fill)[1:].view(x.shape).copy_(x),
    "heads inside": lambda x, _: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "rows apart": lambda x, fill: x.new_full((*x.shape[:-1], x.shape[-1] + 16), fill)[..., 16:].copy_(x),
    "columns first": lambda x, _: x.mT.contiguous().mT,
    "sliced": lambda x, fill: x.new_full(
        (*x.shape[:-2], 2 * x.shape[-2] + 1, 2 * x.shape[-1] + 2), fill
    )[..., 1::2, 2::2].copy_(x),
    "rows repeated": lambda x, _: x[:1].expand_as(x),  # this and the next two can only hold repeated values
    "columns repeated": lambda x, _: x[..., :1].expand_as(x),
    "one number": lambda x, _: x.flatten()[0].expand_as(x),
    "contiguous": lambda x, _: x,
    "beyond 2³¹": lambda x, _: _far(x),
}  # fmt: skip
DIFFERENT = [*LAYOUTS][:8]
REPEATED = DIFFERENT[5:]
LEAST_DIMS = {"heads inside": 3, "columns first": 2, "rows repeated": 2, "columns repeated": 2}
FAR = "beyond 2³¹"  # a layout whose last rows lie more than 2³¹ elements behind the first
WALLED = "walled after row "  # a layout with protected rows: reading them crashes the process
FAR_CAUSE = "an offset beyond 2³¹ − 1 does not fit an int32: convert indices with .to(tl.int64) before multiplying"


def draw(rng: Rng, **operands: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Draw a layout for each operand. With probability ½ or more, tensor descriptors support all of them."""
    options = rng.choice([ALIGNED, [*ALIGNED, "odd offset", "columns first", "sliced"]])
    fit = {name: [o for o in options if x.ndim >= LEAST_DIMS.get(o, 1)] for name, x in operands.items()}
    return operands, {name: rng.choice(fit[name]) for name in operands}


def different(rng: Rng, **operands: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Draw a different layout for each operand. Return the operands with values that their layouts can hold."""
    return _assign(rng.shuffled(DIFFERENT), operands, operands)


def every(rng: Rng, **operands: Any) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return a case for every layout of the first operand; the other operands have other layouts.

    Only the first operand gets layouts with repeated values, such as the gradient of a sum has. operands: tensors, or
    lists with one tensor per rank.
    """
    order = rng.shuffled(DIFFERENT)
    return [_assign(order[i:] + order[:i], operands, [*operands][:1]) for i in range(len(order))]


def _assign(
    options: list[str], operands: dict[str, Any], may_repeat: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Give each operand the first layout that fits. Return (operands with values for their layouts, the layouts)."""
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, x in operands.items():
        tensors = x if isinstance(x, list) else [x]
        fit = [o for o in options if name in may_repeat or o not in REPEATED]
        chosen[name] = next(o for o in fit if tensors[0].ndim >= LEAST_DIMS.get(o, 1) and o not in chosen.values())
        copies = [lay_out(t, chosen[name]).contiguous() for t in tensors]
        values[name] = copies if isinstance(x, list) else copies[0]
    return values, chosen


def far(rng: Rng, **operands: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Give every operand the layout whose offsets exceed 2³¹."""
    return operands, dict.fromkeys(operands, FAR)


def listed(layouts: dict[str, str]) -> str:
    """List the layouts, for a message."""
    return ", ".join(f"{name} {layout}" for name, layout in layouts.items())


def blame(layouts: dict[str, str], judge: Callable[[dict[str, str]], T]) -> T:
    """Call judge(layouts). If it fails, add to the message which operand's layout causes the failure.

    judge: asserts that the result is right for operands with these layouts.
    """
    try:
        return judge(layouts)
    except AssertionError as error:
        text, *rest = str(error).partition("\nassert ")
        error.args = ("".join([text, _blamed(layouts, judge), *rest]),)
        raise


@harmless
def _blamed(layouts: dict[str, str], judge: Callable[[dict[str, str]], object]) -> str:
    def passes(layouts: dict[str, str]) -> bool:
        try:
            judge(layouts)
        except AssertionError:
            return False
        return True

    plain = dict.fromkeys(layouts, "contiguous")
    odd = {name: layout for name, layout in layouts.items() if layout != "contiguous"}
    if not odd or not passes(plain):
        return ""
    culprits = " or ".join(f"{name} is {layout}" for name, layout in odd.items() if not passes({**plain, name: layout}))
    where = f"wrong where {culprits} and all else contiguous" if culprits else "wrong as they lie here"
    return f"\n{LOOKS}right where all operands are contiguous in memory, {where}: are its own strides used?"


def lay_out_all(operands: dict[str, Tensor], layouts: dict[str, str]) -> dict[str, Tensor]:
    """Lay out each operand; without a layout it is contiguous."""
    return {name: lay_out(x, layouts.get(name, "contiguous")) for name, x in operands.items()}


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Copy x to this layout. A layout that repeats values uses the first ones. Gaps hold NaN, or −1 for integers."""
    if not x.numel():
        return x
    if x.ndim == 1 and layout in ("rows apart", "sliced", FAR):
        return lay_out(x[:, None], layout)[:, 0]
    if layout.startswith(WALLED):
        return _walled(x, int(layout.removeprefix(WALLED)))
    return LAYOUTS[layout](x, torch.nan if x.is_floating_point() else -1)


def _far(x: Tensor) -> Tensor:
    """Lay out rows so far apart that offsets of the last ones exceed 2³¹. Only pages that are used take memory.

    As much memory lies before the first row, so an offset that wraps around reads zeros there instead of crashing.
    """
    rows, row = x.movedim(-2, 0), x[..., 0, :]  # each row with all its batches and heads
    stride = (9 << 28) // max(len(rows) - 1, 1) + 1
    strides = (stride, *row.contiguous().stride())
    elements = (1 << 31) + (len(rows) - 1) * stride + row.numel()
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, elements * x.element_size(), flags=flags), dtype=x.dtype)
    return memory[1 << 31 :].as_strided(rows.shape, strides, 1 << 31).copy_(rows).movedim(0, -2)


def _walled(x: Tensor, readable: int) -> Tensor:
    """Lay out rows one after another. Rows from `readable` on lie in protected memory that cannot be read."""
    rows = x.movedim(-2, 0)
    first, rest = (part.numel() * x.element_size() for part in (rows[:readable], rows[readable:]))
    start = -first % mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, start + first + rest), dtype=torch.uint8)
    memory[start : start + first].view(x.dtype).view(rows[:readable].shape).copy_(rows[:readable])
    wall = ctypes.c_void_p(memory.data_ptr() + start + first)
    if ctypes.CDLL(None, use_errno=True).mprotect(wall, ctypes.c_size_t(rest), 0):
        raise OSError(ctypes.get_errno(), "expected to be allowed to protect memory")
    return memory[start : start + first + rest].view(x.dtype).view(rows.shape).movedim(0, -2)
