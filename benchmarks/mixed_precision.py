"""A float32 step against a bfloat16 one, side by side: `python -m benchmarks.mixed_precision`.

Needs a GPU to mean anything; `--device cpu` runs it all the same, on the smallest size, to see that it does.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.course.assignment import ROOT
from lab.model.transformer import SIZES, Transformer
from lab.solution.impl import load

from .results import asked, write

GOAL = 2.0  # bfloat16 over TF32, on the sizes whose products are bound by compute


def main() -> None:
    """Measure, print, keep."""
    options = asked(__doc__, batch={"type": int, "default": 8}, steps={"type": int, "default": 20})
    impl = load(ROOT / "reference")
    sizes = ["small", "medium"] if options.device == "cuda" else ["tiny"]
    with torch.device(options.device):
        rows = [row(impl, size, options) for size in sizes]
    if options.device == "cuda":
        note = f"Medians of {options.steps} steps of AdamW, batch {options.batch}. Goal: bfloat16 {GOAL}x TF32."
        print(write("mixed_precision", rows, note))
    else:
        print(*rows, "a CPU: nothing is kept", sep="\n")


def row(impl: Any, size: str, options: argparse.Namespace) -> dict:
    """One size: milliseconds a step in each precision, and the ratios."""
    config = SIZES[size]
    tokens, targets = torch.randint(config.vocabulary, (2, options.batch, config.context)).unbind()
    benchmark = impl.benchmarking.benchmark.benchmark
    seconds = {}
    for name, tf32 in (("float32", False), ("TF32", True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        seconds[name] = benchmark(plain_step(config, tokens, targets), steps=options.steps).median
    torch.backends.cuda.matmul.allow_tf32 = False
    step = mixed_step(impl, config, tokens, targets)
    seconds["bfloat16"] = benchmark(step, steps=options.steps).median
    return {
        "size": size,
        **{f"{name}, ms": f"{1e3 * s:.1f}" for name, s in seconds.items()},
        "over float32": f"{seconds['float32'] / seconds['bfloat16']:.2f}",
        "over TF32": f"{seconds['TF32'] / seconds['bfloat16']:.2f}",
    }


def plain_step(config: Any, tokens: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """A step on the default device."""
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
