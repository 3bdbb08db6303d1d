"""Stand-ins of stage `benchmarking`."""

import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import torch


def benchmark(module: ModuleType) -> Callable[..., Any]:
    """Times each step between two synchronizations. Returns the `Timing` that students are given."""

    def benchmark(step: Callable[[], object], *, warmup: int = 5, steps: int = 20) -> Any:
        if warmup < 0 or steps < 1:
            raise ValueError(f"expected warmup >= 0 and steps >= 1, got warmup={warmup}, steps={steps}")
        samples = [_once(step) for _ in range(warmup + steps)][warmup:]
        spread = float(numpy.std(samples, ddof=1)) if steps > 1 else 0.0
        return module.Timing(float(numpy.mean(samples)), float(numpy.median(samples)), spread, tuple(samples))

    return benchmark


def flops(module: ModuleType) -> Callable[..., Any]:
    """Counts FLOPs while the model runs on the meta device, without arithmetic: correct, but slow for large sizes."""
    from ..model.transformer import Transformer

    def flops(config: Any, *, batch: int, context: int) -> dict[str, Any]:
        with torch.device("meta"):
            model, tokens = Transformer(config), torch.zeros(batch, context, dtype=torch.int64)
        counted: Counter[str] = Counter()

        def count(layer: torch.nn.Linear, args: Any, out: torch.Tensor) -> None:
            counted[names[layer]] += 2 * out.numel() * layer.in_features

        names = {layer: name.rpartition(".")[2] for name, layer in model.named_modules()}
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(count)
        model(tokens)
        counted["scores"] = counted["values"] = config.layers * batch * config.width * context**2
        return {name: module.Flops(count, 2 * count) for name, count in counted.items()}

    return flops


def _once(step: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start
