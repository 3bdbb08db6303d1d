"""Attention kernels as machine code, without a GPU: `python -m benchmarks.static`. Modelled, not measured.

Each kernel is compiled for sm_80, sm_90 and sm_100 at 16k tokens of 2,048 columns in bfloat16. `--peer path:function`
adds another forward, called as `attention_forward` is, whose tiles are named BLOCK_M and BLOCK_N. A peer that cannot be
compiled or read gets a row with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from lab.measure.kernels import Kernel, compiling, read_cubin
from lab.measure.sass import PIPES, counts, coverage, disassemble, inner_loop
from reference.flash_attention.occupancy import Multiprocessor, occupancy
from reference.flash_attention.overlap import attention_forward_overlapped
from reference.flash_attention.triton_backward_dkdv import attention_backward_dkdv
from reference.flash_attention.triton_backward_dq import attention_backward_dq
from reference.flash_attention.triton_forward import attention_forward

from .peers import add_peer
from .replay import RATES, Replay
from .results import reason, write

TENSOR_FLOPS = {80: 2048, 90: 4096, 100: 8192}  # per cycle and SM, dense 16-bit: A100, H100, B200 data sheets
GPUS = {80: (108, 1.41), 90: (132, 1.755)}  # SMs and GHz: A100, H100 SXM
TILE = 128  # cycles and instructions are per TILE × TILE scores
# Published over replayed TFLOP/s of Triton's tutorial 06: forward, dim 128, N 8,192, not causal, on an H100. Published
# are 464 (facebookexperimental/triton, pull request 205) and 471 (pytorch/benchmark, pull request 2391). This model
# gave 538 for the tutorial's kernel, compiled by Triton 3.7.1.
CALIBRATION = 467 / 538
# TFLOP/s of FlashAttention-2 and cuDNN on an H100, N 8,192, not causal, by direction and dim: Shah et al. 2024,
# "FlashAttention-3", figures 5 and 6. Backward counts five products.
PUBLISHED = {("forward", 128): (370, 600), ("forward", 64): (322, 412), ("backward", 128): (318, 518)}
GOALS = {"forward": (1.4, 0.9), "backward": (1.3, 0.0)}  # ours over the two
NOTE = (
    "Modelled; attention.md and sweep.md have what an H200 measured. All numbers are for the inner loop without a "
    "mask. Instructions and cycles are for one 128 × 128 tile of scores, over all warps. Bound is the busiest pipe. "
    "Covered is the share of exponentials issued while a wgmma of the same warp is in flight. On sm_90 the replay "
    "loads tiles from L2, on sm_80 from shared memory; sm_100 is not replayed. TFLOP/s counts the kernel's own "
    "products, on 132 SMs at 1.755 GHz (sm_90) or 108 at 1.41 GHz (sm_80), times 0.87: published over replayed speed "
    "of Triton's tutorial on sm_90 (464 and 471 over 538)."
)


def main() -> None:
    """Compile, model, print, keep."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--arch", type=int, nargs="+", choices=TENSOR_FLOPS, default=[*TENSOR_FLOPS])
    asked.add_argument("--dim", type=int, nargs="+", choices=(64, 128), default=[128, 64])
    add_peer(asked)
    asked.add_argument("--print", action="store_true", help="keep nothing")
    options = asked.parse_args()
    rows = []
    for arch in options.arch:
        for dim in options.dim:
            for is_causal in (False, True):
                for name, products, launch in passes(dim, is_causal, dict(options.peer)):
                    row = {"sm": arch, "dim": dim, "causal": "yes" if is_causal else "no", "kernel": name}
                    try:
                        with compiling(arch) as kernels:
                            launch()
                        if not kernels:
                            raise ValueError("launched no Triton kernel")
                        rows.append({**row, **figures(kernels[-1], arch, dim, products)})
                    except Exception as error:
                        if name not in dict(options.peer):
                            raise
                        rows.append({**dict.fromkeys(rows[0], "–"), **row, "tile": f"not read: {reason(error)}"})
                    print(*rows[-1].values(), flush=True)
    said = goals(rows)
    print(said if options.print else write("static", rows, f"{NOTE}\n\n{said}"))


def goals(rows: list[dict[str, Any]]) -> str:
    """Our speeds on sm_90, not causal, over the published ones, and what falls short."""
    told = []
    for (direction, dim), peers in PUBLISHED.items():
        cycles = {r["kernel"]: float(r["replayed"]) for r in rows
                  if (r["sm"], r["dim"], r["causal"]) == (90, dim, "no") and r["replayed"] != "–"}  # fmt: skip
        if "dkdv" in cycles:
            cycles["backward"] = cycles["dq"] + cycles["dkdv"]
        for name in ("forward", "overlapped") if direction == "forward" else ("backward",):
            if name in cycles:
                products = 2 if direction == "forward" else 5
                speed = tflops(products * 2 * TILE * TILE * dim, cycles[name], 90)
                ratios = [speed / peer for peer in peers]
                short = any(ratio < goal for ratio, goal in zip(ratios, GOALS[direction], strict=True))
                ends = "falls short" if short else "reached"
                told.append(f"{name} at dim {dim} {speed:.0f}, {ratios[0]:.2f} and {ratios[1]:.2f}: {ends}")
    goal = "forward 1.4 × FlashAttention-2 and 0.9 × cuDNN, backward 1.3 × FlashAttention-2"
    source = 'as published for N 8,192 on an H100, not causal (Shah et al. 2024, "FlashAttention-3", figures 5 and 6)'
    rest = "Not judged: causal speeds, as tiles with a mask are not replayed; backward at dim 64, for want of a figure."
    return f"Goals: {goal}, {source}. Replayed, TFLOP/s and over the two: {'; '.join(told)}. {rest}" if told else ""


def tflops(flops: float, cycles: float, arch: int) -> float:
    """TFLOP/s of a GPU whose SMs take `cycles` for `flops` each."""
    sms, ghz = GPUS[arch]
    return CALIBRATION * flops / cycles * sms * ghz / 1e3


def passes(dim: int, is_causal: bool, peers: dict[str, Callable]) -> list[tuple[str, int, Callable[[], Any]]]:
    """(name, products per tile, launch) of each kernel; nothing is read from these tensors."""
    n = 8192
    q, k, v, o, do = (torch.empty(2, 2048 // dim, n, dim, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.empty(2, 2048 // dim, n)
    return [
        ("forward", 2, lambda: attention_forward(q, k, v, is_causal)),
        ("overlapped", 2, lambda: attention_forward_overlapped(q, k, v, is_causal)),
        ("dq", 3, lambda: attention_backward_dq(q, k, v, o, lse, do, is_causal)),
        ("dkdv", 4, lambda: attention_backward_dkdv(q, k, v, lse, do, lse, is_causal)),
        *((name, 2, lambda peer=peer: peer(q, k, v, is_causal)) for name, peer in peers.items()),
    ]


def figures(kernel: Kernel, arch: int, dim: int, products: int) -> dict[str, Any]:
    """Figures of one kernel, read from its machine code."""
    if not {"BLOCK_M", "BLOCK_N"} <= kernel.keywords.keys():
        raise ValueError(f"expected BLOCK_M and BLOCK_N among the launch's keywords, got {', '.join(kernel.keywords)}")
    block_m, block_n = kernel.keywords["BLOCK_M"], kernel.keywords["BLOCK_N"]
    stages = kernel.keywords.get("num_stages", 3)  # Triton's default
    sm = Multiprocessor(shared_bytes=(164 if arch == 80 else 228) * 1024)
    programs = occupancy(kernel.registers, kernel.shared_bytes, kernel.warps, sm).programs
    loop = inner_loop(disassemble(read_cubin(kernel.cubin, "-sass")))
    per_tile = TILE * TILE / (block_m * block_n)  # steps
    issued = {pipe: n * kernel.warps * per_tile for pipe, n in counts(loop).items()}
    flops = products * 2 * TILE * TILE * dim
    bounds = {pipe: issued.get(pipe, 0) * 32 / rate for pipe, rate in RATES.items()}
    bounds |= {"tensor": flops / TENSOR_FLOPS[arch], "issue": sum(issued.values()) / 4}
    limit = max(bounds, key=bounds.__getitem__)
    cycles = None
    if arch in GPUS and programs:
        walked = block_m if products == 4 else block_n  # rows of the tiles that a step loads
        step = Replay(loop, kernel.warps, programs, max(1, stages - 1), 2 * walked * dim * 2).cycles()
        cycles = step * per_tile / programs
    return {
        "tile": f"{block_m} × {block_n}, {kernel.warps} warps, {stages} stages",
        "registers": kernel.registers, "spilled B": kernel.spilled_bytes, "shared B": kernel.shared_bytes,
        "programs per SM": programs, **{pipe: round(issued.get(pipe, 0)) for pipe in [*PIPES][:6]},
        "covered": f"{coverage(loop):.0%}" if arch == 90 else "–",
        "bound": f"{bounds[limit]:.0f} ({limit})", "replayed": f"{cycles:.0f}" if cycles else "–",
        "TFLOP/s": f"{tflops(flops, cycles, arch):.0f}" if cycles else "–",
    }  # fmt: skip


if __name__ == "__main__":
    main()
