"""Probes of the kernels: set memory layouts, record launches, compile for GPUs that are absent here."""

import contextlib
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness.callers import CallerTensors
from lab.harness.layouts import WALLED, lay_out_all
from lab.measure.kernels import Watch, addresses, watching
from lab.measure.process import poisoned

with contextlib.suppress(ImportError):  # there is no Triton for macOS
    import triton
    import triton.language as tl


def to_device(where: str, *tensors: Tensor) -> list[Tensor]:
    return [t.cuda() if where == "native" else t for t in tensors]


# Kernel → the function that launches it, its arguments, its results, the tensor over which programs loop.
KERNELS = {
    "forward": ("triton_forward.attention_forward", "q k v", "o lse", "k"),
    "overlapped": ("overlap.attention_forward_overlapped", "q k v", "o lse", "k"),
    "dq": ("triton_backward_dq.attention_backward_dq", "q k v o lse do", "dq delta", "k"),
    "dkdv": ("triton_backward_dkdv.attention_backward_dkdv", "q k v lse do delta", "dk dv", "q"),
}


def launched(
    impl: Any, kernel: str, given: dict, is_causal: bool, layouts: dict, where: str, keep: bool = False
) -> dict:
    """Results and launches of one of KERNELS, and whether a second call agrees. keep: also record loads and stores."""
    function, names, returned, walked = KERNELS[kernel]
    operands = dict(zip(names.split(), to_device(where, *(given[n] for n in names.split())), strict=True))
    inputs = lay_out_all(operands, layouts)
    caller = CallerTensors(**{n: x for n, x in inputs.items() if not layouts.get(n, "").startswith(WALLED)})
    call = operator.attrgetter(function)(impl.flash_attention)
    with poisoned(), watching(keep=keep) as seen:
        out = call(*inputs.values(), is_causal)
    second = call(*inputs.values(), is_causal)
    found = {
        **{n: x.cpu() for n, x in zip(returned.split(), out, strict=True)}, **summary(seen), "callers": caller.seen(),
        "changed": [n for n, x in zip(returned.split(), out, strict=True) if keep and not seen.left(x)],
        "same": all(torch.equal(a, b) for a, b in zip(out, second, strict=True)),
        "contiguous": all(x.is_contiguous() for x in out),
        "sources": [[launch.source, launch.settings] for launch in seen.launches],
    }  # fmt: skip
    return found | (_touched(impl, seen, inputs[walked], *out) if keep else {})


def summary(seen: Watch) -> dict:
    return {
        "launches": [[launch.kernel, list(launch.grid)] for launch in seen.launches],
        "operators": sorted(set(seen.operators)), "atomics": seen.atomics,
    }  # fmt: skip


def _touched(impl: Any, seen: Watch, walked: Tensor, *written: Tensor) -> dict:
    """[program, matrix, rows] of each load of `walked`, over which the kernel loops, and each store of written[0]."""
    key_range = impl.flash_attention.causal.key_range  # a stand-in lies in lab
    results = set().union(*(addresses(x).flatten().tolist() for x in written))
    return {
        "loads": [[[*program], matrix, sorted(rows)] for _, program, matrix, rows in seen.rows(walked, "load")],
        "stores": [[[*program], matrix, sorted(rows)] for _, program, matrix, rows in seen.rows(written[0], "store")],
        "elsewhere": len(seen.touched("store", "atomic") - results),
        "own": not getattr(key_range, "fn", key_range).__module__.startswith("lab."),
        "largest": seen.largest, "width": walked.shape[-1], "raced": seen.races(),
    }  # fmt: skip


def ranges(impl: Any, cases: list) -> list:
    """[full, end] of key_range in a kernel, for each (i, queries, keys, BLOCK_M, BLOCK_N, is_causal)."""
    key_range = impl.flash_attention.causal.key_range

    @triton.jit
    def store_range(out, i, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):
        full, end = key_range(i, queries, keys, BLOCK_M, BLOCK_N, IS_CAUSAL)
        tl.store(out, full)
        tl.store(out + 1, end)

    store_range.fn.__globals__["key_range"] = key_range
    found = []
    for i, queries, keys, block_m, block_n, is_causal in cases:
        out = torch.full((2,), -1, dtype=torch.int64)
        store_range[(1,)](out, i, queries, keys, BLOCK_M=block_m, BLOCK_N=block_n, IS_CAUSAL=is_causal)
        found.append(out.tolist())
    return found


def compiles(impl: Any, kernel: str, given: dict, is_causal: bool, layouts: dict) -> list:
    """Compile one of KERNELS for sm_90. Return each kernel's source digest and the arguments that are not tensors."""
    from lab.measure.compiled import compiling

    function, names, *_ = KERNELS[kernel]
    inputs = lay_out_all({n: given[n] for n in names.split()}, layouts)
    with compiling(90) as kernels:
        operator.attrgetter(function)(impl.flash_attention)(*inputs.values(), is_causal)
    return [[each.source, each.settings] for each in kernels]


def autograd(
    impl: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool, where: str, layouts: dict | None = None
) -> dict:
    """o and gradients of the autograd function, the bytes that it saves for backward, and the kernels it launches."""
    given = dict(zip(("q", "k", "v", "do"), to_device(where, q, k, v, do), strict=True))
    q, k, v, do = lay_out_all(given, layouts or {}).values()
    inputs = {n: x.detach().requires_grad_() for n, x in zip("qkv", (q, k, v), strict=True)}
    caller, wanted = CallerTensors(**inputs, do=do), {f"d{n}": x for n, x in inputs.items()}
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(watching())
        o = impl.flash_attention.attention.FlashAttention.apply(*inputs.values(), is_causal)
        forward = summary(seen)
        saved = {t.data_ptr(): t.untyped_storage().nbytes() for t in o.grad_fn.saved_tensors}
        grads = caller.gradients([o], wanted, [do], again=stack.close)
    return {
        "o": o.detach().cpu(), **{n: g.cpu() for n, g in grads.items()}, **summary(seen), "callers": caller.seen(),
        "forward": forward, "saved_bytes": sum(saved.values()), "sources": [launch.source for launch in seen.launches],
    }  # fmt: skip


def overlapped(impl: Any, is_causal: bool, dtype: str) -> dict:
    """Compile for sm_90 at dim 128. "covered": the least fraction of a loop's exponentials issued during a wgmma."""
    from lab.measure.compiled import compiling, read_cubin
    from lab.measure.sass import coverage, disassemble, inner_loops

    q, k, v = (torch.empty(2, 16, 8192, 128, dtype=getattr(torch, dtype)) for _ in range(3))
    with compiling(90) as kernels:
        impl.flash_attention.overlap.attention_forward_overlapped(q, k, v, is_causal)
    (kernel,) = kernels
    loops = inner_loops(disassemble(read_cubin(kernel.cubin, "-sass")))
    return {
        "source": kernel.source, "spilled": kernel.spilled_bytes, "shared": kernel.shared_bytes,
        "exponentials": sum(i.pipe == "mufu" for loop in loops for i in loop), "covered": min(map(coverage, loops)),
        "tile": [kernel.keywords.get(name) for name in ("BLOCK_M", "BLOCK_N")], "warps": kernel.warps,
    }  # fmt: skip


def compiled(impl: Any, *wanted: tuple) -> list:
    """Compile forward and backward for sm_`arch`. wanted: (arch, dim, is_causal, queries, dtype) for each rank.

    Shapes have 16,384 tokens and 2,048 columns (heads × dim) in all.
    """
    from lab.measure.compiled import compiling

    arch, dim, is_causal, queries, dtype = wanted[dist.get_rank() if dist.is_initialized() else 0]
    shape = (16384 // queries, 2048 // dim, queries, dim)
    q, k, v = (torch.empty(shape, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
    with compiling(arch) as kernels:
        o = impl.flash_attention.attention.FlashAttention.apply(q, k, v, is_causal)
        torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    return [
        {"name": kernel.name, "source": kernel.source, "program": kernel.program, "registers": kernel.registers,
         "spilled": kernel.spilled_bytes, "shared": kernel.shared_bytes, "warps": kernel.warps, **kernel.instructions}
        for kernel in kernels
    ]  # fmt: skip
