"""Compares the planner's predictions with training steps on one H200: `python -m benchmarks.single`.

Models: eight layers of Llama 2 7B, of Llama 3 8B, and other sizes, in idiomatic PyTorch: float32 weights, autocast to
bfloat16, compiled blocks, PyTorch's attention, clipped norm, fused AdamW. The prediction is printed before the first
step. `--device cpu` rehearses it with a tiny model, not compiled.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import Job, Plan, of_config
from lab.model.transformer import MODELS, Config, Transformer

from .results import parse_args, reason, write

CLUSTER = cluster("hgx-h200", 1)
NOTE = (
    "Predicted: lab.cluster, with the constants of all other predictions. Measured: median of 6 steps after 3, by the "
    "host's clock; the allocator's highest mark. Errors: predicted over measured, less one."
)


@dataclass(frozen=True)
class Run:
    """A model, and the settings of its step."""

    name: str
    config: Config
    context: int
    sequences: int
    micro_batch: int
    recompute: str = "none"

    def predicted(self) -> tuple[float, float]:
        """Predict a step's seconds and peak bytes."""
        job = Job(of_config(self.config), self.sequences, self.context, CLUSTER)
        plan = Plan(micro_batch=self.micro_batch, recompute=self.recompute)
        return steps.price(job, plan).step_s, steps.memory(job, plan)["total"]


LLAMA2_7B, LLAMA3_8B = (replace(MODELS[name], layers=8, context=8192) for name in ("7b", "8b"))
RUNS = (
    Run("7b, 8 layers", LLAMA2_7B, 4096, 2, 2),
    Run("7b, 8 layers", LLAMA2_7B, 4096, 2, 2, "full"),
    Run("7b, 8 layers", LLAMA2_7B, 2048, 4, 4),
    Run("7b, 8 layers", LLAMA2_7B, 8192, 1, 1),
    Run("7b, 8 layers", LLAMA2_7B, 4096, 8, 2),
    Run("7b, 16 layers", replace(LLAMA2_7B, layers=16), 4096, 2, 2),
    Run("8b, 8 layers", LLAMA3_8B, 8192, 1, 1),
    Run("xl", MODELS["xl"], 2048, 4, 4),
    Run("medium", MODELS["medium"], 1024, 8, 8),
)


def main() -> None:
    """Predict, measure, print, and write the results."""
    gpu = parse_args(__doc__).device == "cuda"
    runs = RUNS if gpu else (Run("tiny", MODELS["tiny"], 64, 2, 1, "full"),)
    expected = {run: run.predicted() for run in runs}
    rows = []
    for run, (seconds, bytes) in expected.items():
        row = {
            "model": run.name,
            "context": run.context,
            "micro-batches": f"{run.sequences // run.micro_batch} of {run.micro_batch}",
            "recomputed": {"none": "nothing", "full": "layers"}[run.recompute],
            "predicted, ms": f"{1e3 * seconds:.1f}",
            "predicted, GB": f"{bytes / 1e9:.1f}",
        }
        print(row, flush=True)
        rows.append(row)
    for run, row in zip(runs, rows, strict=True):
        try:
            with torch.device("cuda" if gpu else "cpu"):
                seconds, spread, peak = measure(run, gpu)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["measured, ms"] = reason(error)
        else:
            job = Job(of_config(run.config), run.sequences, run.context, CLUSTER)
            row["measured, ms"] = f"{1e3 * seconds:.1f} ±{1e3 * spread:.1f}"
            row["error"] = f"{100 * (expected[run][0] / seconds - 1):+.0f} %"
            row["TFLOP/s"] = f"{steps.model_flops(job) / seconds / 1e12:.0f}"
            row["measured, GB"] = f"{peak / 1e9:.1f}"
            row["error of memory"] = f"{100 * (expected[run][1] / max(peak, 1) - 1):+.0f} %"
        print(row, flush=True)
    if gpu:
        print(write("single", rows, NOTE))


def measure(run: Run, gpu: bool) -> tuple[float, float, int]:
    """Median and spread (half of maximum - minimum) of a step's seconds, and peak bytes allocated."""
    torch._dynamo.reset()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step, times = training_step(run, gpu), []
    for _ in range(9 if gpu else 2):
        start = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times = times[3:] or times
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    return statistics.median(times), (max(times) - min(times)) / 2, peak


def training_step(run: Run, gpu: bool) -> Callable[[], None]:
    """Return a function that runs forward and backward of each micro-batch, clips the norm, and runs AdamW."""
    model = Transformer(run.config, attend)
    optimizer = torch.optim.AdamW(model.parameters(), fused=gpu)
    compiled = (lambda f: torch.compile(f, dynamic=False)) if gpu else (lambda f: f)
    blocks = [compiled(block) for block in model.blocks]
    cos, sin = model.cos[: run.context], model.sin[: run.context]

    @compiled
    def head_loss(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1).float(), targets.flatten())

    def step() -> None:
        for _ in range(run.sequences // run.micro_batch):
            tokens, targets = torch.randint(run.config.vocabulary, (2, run.micro_batch, run.context)).unbind()
            with torch.autocast("cuda" if gpu else "cpu", torch.bfloat16):
                x = model.embedding(tokens).bfloat16()
                for block in blocks:
                    recomputed = run.recompute == "full"
                    x = checkpoint(block, x, cos, sin, use_reentrant=False) if recomputed else block(x, cos, sin)
                loss = head_loss(x, targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """PyTorch's attention with the signature that Transformer expects."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


if __name__ == "__main__":
    main()
