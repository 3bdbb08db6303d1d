"""Throughput of a training run: tokens per second, utilization (MFU), memory."""

import os
import resource
import statistics
import time

import torch
import torch.distributed as dist

from ..model.transformer import Config

SIDE, REPEATS = 1024, 5  # side and runs of the matrix product that measures the machine's peak
GPU_SIDE = 8192


def step_flops(config: Config, sequences: int, context: int, k: int = 0) -> float:
    """Return the FLOPs of a step's products, forward and backward. Causal attention counts half, recomputation nothing.

    6 per token and parameter of a product, and 6 · context · width per token and block. k: number of experts per token,
    each a SwiGLU; 0: a single SwiGLU. Example: the tiny model, 16 sequences of 128: 6 · 2,048 · 108,544 + 6 · 2,048 ·
    128 · 64 · 2 = 1.54 GFLOP. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    kv = config.kv_heads * config.dim
    block = 2 * config.width * (config.width + kv) + 3 * config.width * config.hidden * max(k, 1)
    tokens, head = sequences * context, config.width * config.vocabulary
    return 6.0 * tokens * (config.layers * block + head + config.layers * context * config.width)


class Meter:
    """Times each step in a `with meter:` block. Every rank has a Meter. The first step, a warm-up, does not count."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, list[float]()
        self.peak_flops_s = _peak_flops_s(device)

    def __enter__(self) -> None:
        self._synchronize()
        self.start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self._synchronize()
        self.seconds.append(time.perf_counter() - self.start)

    def summary(self, flops: float, tokens: int, state_bytes: int) -> dict[str, float]:
        """Return results of the median step, and the largest memory of any rank. Every rank must call this.

        "mfu" is the model's FLOP/s divided by the FLOP/s of a large float32 product on the same cores or GPUs.
        """
        measured = self.seconds[1:] or self.seconds or [float("nan")]
        maxima = torch.tensor([float(self._peak_bytes()), float(state_bytes)], device=self.device, dtype=torch.float64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        step_s = statistics.median(measured)
        return {
            "step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": flops / step_s / self.peak_flops_s,
            "peak_bytes": maxima[0].item(), "state_bytes": maxima[1].item(),
        }  # fmt: skip

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        """Return torch's peak of allocated bytes on a GPU, otherwise the process's peak size."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_flops_s(device: torch.device) -> float:
    """Return the FLOP/s of a large float32 product on all ranks' cores or GPUs. Rank 0 measures it for all."""
    rate = torch.zeros(1, dtype=torch.float64, device=device)
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
        rate += 2 * side**3 / min(times)
        torch.set_num_threads(threads)
    dist.all_reduce(rate)
    machines = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or 1
    return rate.item() * (dist.get_world_size() if device.type == "cuda" else machines)
