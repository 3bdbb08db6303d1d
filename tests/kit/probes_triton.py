"""Small kernels that test lab.measure.kernels and lab.measure.compiled."""

import torch
import triton
import triton.language as tl

from lab.measure.compiled import compiling
from lab.measure.kernels import watching


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, 2 * tl.load(x + offs, mask=offs < n, other=0.0), mask=offs < n)


@triton.jit
def add_up(x, total, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    partial = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    if ATOMIC:
        tl.atomic_add(total, partial)
    else:
        tl.store(total, tl.load(total) + partial)


def watched(impl, n: int) -> dict:
    """Run double() on n numbers, in rows of 4 and programs of 16, after one torch operator."""
    storage = torch.arange(float(n))
    x, y = storage.view(-1, 4), torch.zeros(n).view(-1, 4)
    with watching(keep=True) as seen:
        y.fill_(float("nan"))
        double[(triton.cdiv(n, 16),)](x, y, n, BLOCK=16)
    return {
        "y": y, "launches": [[launch.kernel, list(launch.grid)] for launch in seen.launches],
        "operators": seen.operators, "races": seen.races(), "source": seen.launches[0].source,
        "loads": [[program[0], sorted(rows)] for _, program, _, rows in seen.rows(x, "load")],
        "stores": [[program[0], sorted(rows)] for _, program, _, rows in seen.rows(y, "store")],
    }  # fmt: skip


def solved(impl) -> None:
    with watching():
        impl.flash_attention.weighted_sum_forward.weighted_sum_forward(torch.ones(20))


def added(impl, atomic: bool) -> list:
    """Return (total, races, atomics) of four programs that add to one number."""
    total = torch.zeros(1)
    with watching(keep=True) as seen:
        add_up[(4,)](torch.ones(64), total, BLOCK=16, ATOMIC=atomic)
    return [total.item(), seen.races(), seen.atomics]


def spilled(impl, arch: int, is_causal: bool) -> int:
    """Bytes that each thread spills in the forward kernel of the exercise `overlap`. It is compiled but not run."""
    q, k, v = (torch.empty(2, 16, 8192, 128, dtype=torch.bfloat16) for _ in range(3))
    with compiling(arch) as kernels:
        impl.flash_attention.overlap.attention_forward_overlapped(q, k, v, is_causal)
    return kernels[-1].spilled_bytes
