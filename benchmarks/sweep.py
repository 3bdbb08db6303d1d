"""Tries tile sizes, warps and stages of the attention kernels: `python -m benchmarks.sweep`, on a GPU.

A stopped run continues where it was. `--device cpu` runs each kernel once in the interpreter, and keeps nothing.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from lab.course.assignment import ROOT
from lab.solution.impl import load

from .attention import TOKENS, WIDTH, inputs, timed
from .results import RowCache, parse_args, reason

N, REPEATS = 8192, 8
TILES = {  # BLOCK_M, BLOCK_N, warps
    "forward": [(128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (64, 32, 4)],
    "overlapped": [(128, 128, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4)],
    "dq": [(128, 64, 8), (128, 64, 4), (64, 64, 4), (64, 32, 4)],
    "dkdv": [(64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4), (32, 128, 4)],
}
STAGES = (1, 2, 3, 4)
PRODUCTS = {"forward": 2, "overlapped": 2, "dq": 3, "dkdv": 4}


def main() -> None:
    """Measure, print, and write the results."""
    if parse_args(__doc__).device == "cpu":
        return rehearse()
    compile_all()
    cache, modules = RowCache("sweep"), _modules()
    for dim, is_causal in itertools.product((128, 64), (False, True)):
        calls = _calls(modules, dim, is_causal, *inputs(N, dim))
        for name, module in modules.items():
            original = module._blocks
            for m, n, warps, stages in configurations(name):
                words = f"{m} × {n}, {warps} warps, {stages} stages"
                key = {"dim": dim, "causal": is_causal, "kernel": name, "configuration": words}
                if not cache.has(**key):
                    module._blocks = lambda *_, choice=(m, n, warps, stages): choice
                    cache.add({**key, "TFLOP/s": _speed(calls[name], PRODUCTS[name], is_causal)})
                    print(*cache.rows[-1].values(), flush=True)
                    if "CUDA error" in cache.rows[-1]["TFLOP/s"]:
                        raise SystemExit("after a CUDA error this process can measure nothing: run again, to go on")
            module._blocks = original
    print(cache.write(f"bfloat16, N {N:,}; each kernel's own products; medians of {REPEATS}."))


def configurations(name: str) -> list[tuple[int, int, int, int]]:
    """Return the configurations to try: (BLOCK_M, BLOCK_N, warps, stages)."""
    return [(*tile, stages) for tile, stages in itertools.product(TILES[name], STAGES)]


def compile_all() -> None:
    """Compile all configurations into Triton's cache, one process per core."""
    jobs = itertools.product(TILES, (128, 64), (False, True))
    cases = [(*job, choice) for job in jobs for choice in configurations(job[0])]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, cases))


def _compile(case: tuple[str, int, bool, tuple[int, int, int, int]]) -> None:
    name, dim, is_causal, choice = case
    modules = _modules()
    module, original = modules[name], modules[name]._blocks
    module._blocks = lambda *_: choice
    with contextlib.suppress(Exception):  # the timed run reports errors
        _calls(modules, dim, is_causal, *inputs(N, dim))[name]()
    module._blocks = original


def _speed(call: Any, products: int, is_causal: bool) -> str:
    flops = products * 2 * TOKENS * N * WIDTH * (0.5 if is_causal else 1.0)
    try:
        seconds = sorted(timed(call) for _ in range(REPEATS + 2))[REPEATS // 2]
    except Exception as error:  # too much shared memory, or a compiler error
        return reason(error)
    return f"{flops / seconds / 1e12:.0f}"


@functools.cache
def _modules() -> dict[str, Any]:
    kernels = load(ROOT / "reference").flash_attention
    return {
        "forward": kernels.triton_forward,
        "overlapped": kernels.overlap,
        "dq": kernels.triton_backward_dq,
        "dkdv": kernels.triton_backward_dkdv,
    }


def _calls(modules: dict[str, Any], dim: int, is_causal: bool, *tensors: torch.Tensor) -> dict[str, Any]:
    """Return a call per kernel that launches it, all on the same q, k and v."""
    with torch.no_grad():
        q, k, v = (t.detach() for t in tensors)
        do = torch.randn_like(q)
        o, lse = modules["forward"].attention_forward(q, k, v, is_causal)
        _, delta = modules["dq"].attention_backward_dq(q, k, v, o, lse, do, is_causal)
    return {
        "forward": lambda: modules["forward"].attention_forward(q, k, v, is_causal),
        "overlapped": lambda: modules["overlapped"].attention_forward_overlapped(q, k, v, is_causal),
        "dq": lambda: modules["dq"].attention_backward_dq(q, k, v, o, lse, do, is_causal),
        "dkdv": lambda: modules["dkdv"].attention_backward_dkdv(q, k, v, lse, do, delta, is_causal),
    }


def rehearse() -> None:
    """Run each kernel once in the interpreter, with the first configuration of the sweep."""
    os.environ["TRITON_INTERPRET"] = "1"
    modules = _modules()
    calls = _calls(modules, 32, True, *(torch.randn(1, 2, 64, 32, dtype=torch.float16) for _ in range(3)))
    for name, module in modules.items():
        module._blocks = lambda *_, choice=(*TILES[name][0], STAGES[0]): choice
        first, second = calls[name]()
        assert first.isfinite().all(), f"{name}: not finite"
        assert second.isfinite().all(), f"{name}: not finite"
        print(f"{name}: ran in the interpreter; nothing is kept")


if __name__ == "__main__":
    main()
