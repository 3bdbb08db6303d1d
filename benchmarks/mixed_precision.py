"""Compares a step in float32 with one in bfloat16: `python -m benchmarks.mixed_precision`.

`--device cpu` rehearses it on the smallest size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.course.assignment import ROOT
from lab.model.transformer import SIZES, Transformer
from lab.solution.impl import load

from .results import parse_args, write

GOAL = 2.0  # speed of bfloat16 over TF32, for sizes whose matrix products are compute-bound


def main() -> None:
    """Measure, print, and write the results."""
    device, impl = parse_args(__doc__).device, load(ROOT / "reference")
    sizes, batch, steps = (("small", "medium"), 8, 20) if device == "cuda" else (("tiny",), 1, 2)
    with torch.device(device):
        rows = [row(impl, size, batch, steps) for size in sizes]
    print(*rows, sep="\n")
    if device == "cuda":
        note = f"Medians of {steps} steps of AdamW, batch {batch}. Goal: bfloat16 {GOAL}x TF32."
        write("mixed_precision", rows, note)


def row(impl: Any, size: str, batch: int, steps: int) -> dict:
    """Measure one size. Return milliseconds per step in each precision, and the ratios."""
    config, benchmark = SIZES[size], impl.benchmarking.benchmark.benchmark
    tokens, targets = torch.randint(config.vocabulary, (2, batch, config.context)).unbind()
    seconds = {}
    for name, tf32 in (("float32", False), ("TF32", True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        seconds[name] = benchmark(plain_step(config, tokens, targets), steps=steps).median
    torch.backends.cuda.matmul.allow_tf32 = False
    seconds["bfloat16"] = benchmark(mixed_step(impl, config, tokens, targets), steps=steps).median
    over = {f"over {name}": f"{seconds[name] / seconds['bfloat16']:.2f}" for name in ("float32", "TF32")}
    return {"size": size, **{f"{name}, ms": f"{1e3 * s:.1f}" for name, s in seconds.items()}, **over}


def plain_step(config: Any, tokens: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """Return a function that runs a training step on the default device."""
    model = Transformer(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.loss(tokens, targets).backward()
        optimizer.step()

    return step


def mixed_step(impl: Any, config: Any, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    module, scaling = impl.mixed_precision.mixed_step, impl.mixed_precision.loss_scaler
    model = Transformer(config).to(torch.bfloat16)
    masters = module.master_weights(model)
    optimizer, scaler = torch.optim.AdamW(masters), scaling.LossScaler(1.0)

    def step() -> None:
        module.mixed_step(model, masters, optimizer, scaler, lambda m: m.loss(tokens, targets))

    return step


if __name__ == "__main__":
    main()
