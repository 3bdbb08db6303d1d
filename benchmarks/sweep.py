"""Tile sizes, warps and stages of the attention kernels, tried one by one: `python -m benchmarks.sweep`, on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from lab.course.assignment import ROOT
from lab.solution.impl import load

from .attention import TOKENS, WIDTH, inputs, timed
from .results import write

N, REPEATS = 8192, 8
TILES = {
    "forward": [(128, 128), (128, 64), (64, 128)],
    "dq": [(128, 64), (64, 64), (64, 128)],
    "dkdv": [(64, 128), (32, 128), (64, 64)],
}
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}


def main() -> None:
    """Measure, print, keep."""
    if not torch.cuda.is_available():
        raise SystemExit("not run: no CUDA device")
    kernels = load(ROOT / "reference").flash_attention
    modules = {
        "forward": kernels.triton_forward,
        "dq": kernels.triton_backward_dq,
        "dkdv": kernels.triton_backward_dkdv,
    }
    rows = []
    for dim, is_causal in itertools.product((128, 64), (False, True)):
        calls = _calls(modules, dim, is_causal)
        for name, module in modules.items():
            chosen = module._blocks
            flops = PRODUCTS[name] * 2 * TOKENS * N * WIDTH * (0.5 if is_causal else 1.0)
            for (m, n), warps, stages in itertools.product(TILES[name], (4, 8), (2, 3)):
                words = f"{m} × {n}, {warps} warps, {stages} stages"
                module._blocks = lambda *_, choice=(m, n, warps, stages): choice
                row: dict[str, Any] = {"dim": dim, "causal": is_causal, "kernel": name, "configuration": words}
                try:
                    seconds = sorted(timed(calls[name]) for _ in range(REPEATS + 2))[REPEATS // 2]
                    rows.append({**row, "TFLOP/s": f"{flops / seconds / 1e12:.0f}"})
                except Exception as error:  # too much shared memory, or the compiler gives up
                    rows.append({**row, "TFLOP/s": str(error).splitlines()[0][:80]})
                print(*rows[-1].values(), flush=True)
            module._blocks = chosen
    print(write("sweep", rows, f"bfloat16, N {N:,}; each kernel's own products; medians of {REPEATS}."))


def _calls(modules: dict[str, Any], dim: int, is_causal: bool) -> dict[str, Any]:
    """Launches of the three kernels on the same inputs."""
    with torch.no_grad():
        q, k, v = (t.detach() for t in inputs(N, dim))
        do: Tensor = torch.randn_like(q)
        o, lse = modules["forward"].attention_forward(q, k, v, is_causal)
        _, delta = modules["dq"].attention_backward_dq(q, k, v, o, lse, do, is_causal)
    return {
        "forward": lambda: modules["forward"].attention_forward(q, k, v, is_causal),
        "dq": lambda: modules["dq"].attention_backward_dq(q, k, v, o, lse, do, is_causal),
        "dkdv": lambda: modules["dkdv"].attention_backward_dkdv(q, k, v, lse, do, delta, is_causal),
    }


if __name__ == "__main__":
    main()
