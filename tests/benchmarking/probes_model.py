"""Probes of `benchmark_model`: the model records its calls, and the simulated GPU has known times."""

import copy
from typing import Any

import torch
from torch import Tensor

from lab.harness.raising import raised
from lab.measure.device import current
from lab.measure.roofline import is_on_gpu
from lab.model.transformer import Config, Transformer


class Watched(Transformer):
    """Records at each loss: tokens, whether autograd is on, existing gradients, and changed parameters."""

    def watch(self) -> None:
        self.calls: list[dict] = []
        self.first = [p.detach().clone() for p in self.parameters()]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parameters = [*self.parameters()]
        with torch.no_grad():
            moved = sum(bool((p != f).any()) for p, f in zip(parameters, self.first, strict=True))
        self.calls.append({
            "shapes": [list(tokens.shape), list(targets.shape)],
            "range": [int(min(tokens.min(), targets.min())), int(max(tokens.max(), targets.max()))],
            "sum": [int(tokens.sum()), int(targets.sum())],
            "different": [int(t.unique().numel()) for t in (tokens, targets)],
            "same": torch.equal(tokens, targets),
            "training": self.training,
            "grad": torch.is_grad_enabled(),
            "leftover": sum(p.grad is not None and bool(p.grad.any()) for p in parameters),
            "moved": moved,
        })  # fmt: skip
        self.given = tokens, targets
        return super().loss(tokens, targets)


def watched(
    impl: Any, sizes: dict, batch: int, context: int, mode: str, warmup: int, steps: int, training: bool
) -> dict:
    """Return the model's records, and the number of samples. training: the model's mode before the call.

    "apart" in the result: largest difference from a copy that AdamW trains, with default arguments, on all parameters.
    """
    model = Watched(Config(**sizes)).train(training)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters())
    model.watch()
    timing = _benchmarked(impl, model, batch, context, mode, warmup, steps)
    left = sum(p.grad is not None for p in model.parameters())
    for _ in range(warmup + steps if mode == "step" else 0):
        optimizer.zero_grad()
        Transformer.loss(twin, *model.given).backward()
        optimizer.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return {
        "calls": model.calls, "samples": len(timing.samples), "left": left, "training": model.training,
        "apart": max(float((p - t).abs().max()) for p, t in pairs),
    }  # fmt: skip


def placement(impl: Any, sizes: dict, batch: int, context: int, mode: str) -> list[list[bool]]:
    """Whether tokens and targets were on the simulated GPU, for each call of loss."""
    on_gpu = []

    class Placed(Transformer):
        def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
            on_gpu.append([is_on_gpu(tokens), is_on_gpu(targets)])
            return super().loss(tokens, targets)

    _benchmarked(impl, Placed(Config(**sizes)).cuda(), batch, context, mode, 1, 2)
    return on_gpu


def timed(impl: Any, sizes: dict, batch: int, context: int, mode: str, warmup: int, steps: int) -> list[float]:
    """The samples in seconds, timed on the simulated GPU."""
    timing = _benchmarked(impl, Transformer(Config(**sizes)).cuda(), batch, context, mode, warmup, steps)
    return [float(s) for s in timing.samples]


def _benchmarked(impl: Any, model: Transformer, batch: int, context: int, mode: str, warmup: int, steps: int) -> Any:
    benchmark_model = impl.benchmarking.benchmark_model.benchmark_model
    return benchmark_model(model, batch=batch, context=context, mode=mode, warmup=warmup, steps=steps)


def costs(impl: Any, sizes: dict, batch: int, context: int, mode: str, warmup: int, steps: int) -> list[float]:
    """Seconds that each measured step takes on the simulated GPU. Does not call impl."""
    gpu, model = current(), Transformer(Config(**sizes)).cuda()
    tokens, targets = torch.randint(sizes["vocabulary"], (2, batch, context), device="cuda").unbind()
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(warmup + steps):
        torch.cuda.synchronize()
        start = gpu.now
        if mode == "forward":
            with torch.no_grad():
                model.loss(tokens, targets)
        else:
            model.zero_grad(set_to_none=True)
            model.loss(tokens, targets).backward()
        if mode == "step":
            optimizer.step()
        torch.cuda.synchronize()
        seconds.append(gpu.now - start)
    return seconds[warmup:]


def refused(impl: Any, sizes: dict, options: dict) -> list:
    """The name of the exception for invalid arguments, and how often the model was called."""
    model = Watched(Config(**sizes))
    model.watch()
    benchmark_model = impl.benchmarking.benchmark_model.benchmark_model
    return [raised(lambda: benchmark_model(model, warmup=0, steps=1, **options)), len(model.calls)]
