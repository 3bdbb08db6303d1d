"""Throughput of a training run: tokens per second, utilization (MFU), memory."""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist

from ..model.transformer import Config

SIDE, REPEATS = 1024, 5  # of the product that stands for the machine's peak
GPU_SIDE = 8192


def step_flops(config: Config, sequences: int, context: int, k: int = 0) -> float:
    """FLOPs of a step's products, forward and backward; causal attention counts half, what is recomputed nothing.

    6 for each parameter of a product and token, and 6 · context · width for each block and token. k: experts for each
    token, of which each is a SwiGLU; 0: one. The tiny model, 16 sequences of 128: 6 · 2,048 · 108,544 + 6 · 2,048 ·
    128 · 64 · 2 = 1.54 GFLOP. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    kv = config.kv_heads * config.dim
    block = 2 * config.width * (config.width + kv) + 3 * config.width * config.hidden * max(k, 1)
    tokens, head = sequences * context, config.width * config.vocabulary
    return 6.0 * tokens * (config.layers * block + head + config.layers * context * config.width)


class Meter:
    """Times steps: `with meter:` around each. All ranks have one; the first step is not counted, for it warms up."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, list[float]()
        self.peak_flops_s = _peak_flops_s(device)

    def __enter__(self) -> None:
        self._synchronize()
        self.start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self._synchronize()
        self.seconds.append(time.perf_counter() - self.start)

    def told(self, flops: float, tokens: int, state_bytes: int) -> dict[str, float]:
        """Of the median step; memory is that of the rank that has most. Every rank calls it.

        "mfu" is the model's FLOP/s over what a large float32 product reached on the same cores or GPUs, all of them.
        """
        counted = self.seconds[1:] or self.seconds or [float("nan")]
        most = torch.tensor([float(self._peak_bytes()), float(state_bytes)], device=self.device, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        step_s = statistics.median(counted)
        return {
            "step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": flops / step_s / self.peak_flops_s,
            "peak_bytes": most[0].item(), "state_bytes": most[1].item(),
        }  # fmt: skip

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        """On a GPU what torch has allocated at most, else the process's largest size; 0 where that is not told."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        try:
            import resource
        except ImportError:  # Windows
            return 0
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_flops_s(device: torch.device) -> float:
    """FLOP/s of a large float32 product on all that the ranks have: measured by the first of a machine, told to all."""
    found = torch.zeros(1, dtype=torch.float64, device=device)
    dist.barrier()
    if dist.get_rank() == 0:
        threads = torch.get_num_threads()
        if device.type == "cpu":
            torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads)
        side = GPU_SIDE if device.type == "cuda" else SIDE
        a = torch.randn(side, side, device=device)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            (a @ a)[0, 0].item()
            times.append(time.perf_counter() - start)
        found += 2 * side**3 / min(times)
        torch.set_num_threads(threads)
    dist.all_reduce(found)
    machines = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or 1
    return found.item() * (dist.get_world_size() if device.type == "cuda" else machines)
