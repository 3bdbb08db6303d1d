"""Attention kernels as machine code, without a GPU: `python -m benchmarks.static`. Modelled, not measured.

Each kernel is compiled for sm_80, sm_90 and sm_100 at 16k tokens of 2,048 columns in bfloat16. `--peer path:function`
adds another forward, called as `attention_forward` is, whose tiles are named BLOCK_M and BLOCK_N.
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
from .results import write

TENSOR_FLOPS = {80: 2048, 90: 4096, 100: 8192}  # per cycle and SM, dense 16-bit: A100, H100, B200 data sheets
GPUS = {80: (108, 1.41), 90: (132, 1.755)}  # SMs and GHz: A100, H100 SXM
TILE = 128  # cycles and instructions are per TILE × TILE scores
CALIBRATION = 467 / 538  # Triton's tutorial forward at dim 128 on an H100: published over replayed TFLOP/s
NOTE = (
    "Modelled, not measured: no GPU was available. All numbers are for the inner loop without a mask. Instructions and "
    "cycles are for one 128 × 128 tile of scores, over all warps. Bound is the busiest pipe. Covered is the share of "
    "exponentials issued while a wgmma of the same warp is in flight. On sm_90 the replay loads tiles from L2, on "
    "sm_80 from shared memory; sm_100 is not replayed. TFLOP/s counts the kernel's own products, on 132 SMs at "
    "1.755 GHz (sm_90) or 108 at 1.41 GHz (sm_80), times 0.87: published over "
    "replayed speed of Triton's tutorial on sm_90."
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
                    with compiling(arch) as kernels:
                        launch()
                    row = {"sm": arch, "dim": dim, "causal": "yes" if is_causal else "no", "kernel": name}
                    rows.append({**row, **figures(kernels[-1], arch, dim, products)})
                    print(*rows[-1].values(), flush=True)
    if not options.print:
        print(write("static", rows, NOTE))


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
    block_m, block_n = kernel.keywords["BLOCK_M"], kernel.keywords["BLOCK_N"]
    stages = kernel.keywords["num_stages"]
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
        "TFLOP/s": f"{CALIBRATION * flops / cycles * GPUS[arch][0] * GPUS[arch][1] / 1e3:.0f}" if cycles else "–",
    }  # fmt: skip


if __name__ == "__main__":
    main()
