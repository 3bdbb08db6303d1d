"""What runs beside the implementation: a model that notices what is done to it, on a GPU whose every time is known."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lab.harness.raising import raised
from lab.measure.device import current
from lab.measure.roofline import holds
from lab.model.transformer import Config, Transformer


class Watched(Transformer):
    """Notes, at each loss: the tokens, whether autograd is on, what gradients there are, and what has changed."""

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
            "devices": [tokens.device.type, targets.device.type],
            "sum": [int(tokens.sum()), int(targets.sum())],
            "different": [int(t.unique().numel()) for t in (tokens, targets)],
            "same": torch.equal(tokens, targets),
            "training": self.training,
            "grad": torch.is_grad_enabled(),
            "kept": sum(p.grad is not None for p in parameters),
            "leftover": sum(p.grad is not None and bool(p.grad.any()) for p in parameters),
            "moved": moved,
        })  # fmt: skip
        self.given = tokens, targets
        return super().loss(tokens, targets)


def watched(
    impl: Any, sizes: dict, batch: int, context: int, mode: str, warmup: int, steps: int, training: bool
) -> dict:
    """Return what the model noticed, and the number of samples. training: the mode that the model is handed over in.

    apart: how far it is from a twin that AdamW trained, over all parameters and with its default arguments.
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
    both = zip(model.parameters(), twin.parameters(), strict=True)
    return {
        "calls": model.calls, "samples": len(timing.samples), "left": left, "training": model.training,
        "apart": max(float((p - t).abs().max()) for p, t in both),
    }  # fmt: skip


def placed(impl: Any, sizes: dict, batch: int, context: int, mode: str) -> list[list[bool]]:
    """On the simulated GPU: whether tokens and targets were on it, at each loss."""
    places = []

    class Placed(Transformer):
        def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
            places.append([holds(tokens), holds(targets)])
            return super().loss(tokens, targets)

    _benchmarked(impl, Placed(Config(**sizes)).cuda(), batch, context, mode, 1, 2)
    return places


def timed(impl: Any, sizes: dict, batch: int, context: int, mode: str, warmup: int, steps: int) -> list[float]:
    """On the simulated GPU: the samples."""
    timing = _benchmarked(impl, Transformer(Config(**sizes)).cuda(), batch, context, mode, warmup, steps)
    return [float(s) for s in timing.samples]


def _benchmarked(impl: Any, model: Transformer, batch: int, context: int, mode: str, warmup: int, steps: int) -> Any:
    benchmark_model = impl.benchmarking.benchmark_model.benchmark_model
    return benchmark_model(model, batch=batch, context=context, mode=mode, warmup=warmup, steps=steps)


# How else a step may be written, and what is then to be said of it.
OTHERWISE = {
    "backward alone": "backward is gone through again and again, and forward once: the loss belongs into each step",
    "forward alone": "there is no backward in it",
    "no optimizer step": "it is forward and backward, and the optimizer does not step",
    "sums": "gradients of the step before are still there, and backward adds to them",
    "zeros": "gradients are filled with zeros, and backward adds to them: set_to_none=True",
    "new optimizer": "an optimizer is made in each step, and its state allocated",
    "new tokens": "tokens are drawn in each step: make them before",
    "autograd": "autograd is on, though nothing is to go backward",
}


def costs(
    impl: Any, sizes: dict, batch: int, context: int, mode: str, warmup: int, steps: int, how: str = ""
) -> list[float]:
    """On the simulated GPU, what each step costs the device and the host, written out. Asks impl nothing.

    how: a key of OTHERWISE, for what it costs where it is written so.
    """
    gpu, model = current(), Transformer(Config(**sizes)).cuda()
    tokens, targets = torch.randint(sizes["vocabulary"], (2, batch, context), device="cuda").unbind()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = model.loss(tokens, targets) if how == "backward alone" else None
    seconds = []
    for _ in range(warmup + steps):
        torch.cuda.synchronize()
        start = gpu.now
        drawn = torch.randint_like(tokens, sizes["vocabulary"]) if how == "new tokens" else tokens
        if mode == "forward":
            with torch.set_grad_enabled(how == "autograd"):
                model.loss(drawn, targets)
        else:
            if how != "sums":
                model.zero_grad(set_to_none=how != "zeros")
            loss = model.loss(drawn, targets) if kept is None else kept
            if how != "forward alone":
                loss.backward(retain_graph=kept is not None)
        if mode == "step" and how != "no optimizer step":
            (torch.optim.AdamW(model.parameters()) if how == "new optimizer" else optimizer).step()
        torch.cuda.synchronize()
        seconds.append(gpu.now - start)
    return seconds[warmup:]


def refused(impl: Any, sizes: dict, options: dict) -> list:
    """How it answers what makes no sense: the exception's name, and how often the model was called."""
    model = Watched(Config(**sizes))
    model.watch()
    benchmark_model = impl.benchmarking.benchmark_model.benchmark_model
    return [raised(lambda: benchmark_model(model, warmup=0, steps=1, **options)), len(model.calls)]
