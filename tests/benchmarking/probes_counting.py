"""Probes that count FLOPs and bytes by formula, and measure the same in a run of the real model."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab.harness.calls import plain
from lab.harness.raising import without_models
from lab.model.transformer import Config, Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}


def flops(impl: Any, sizes: dict, batch: int, context: int, on_paper: bool = False) -> dict:
    """FLOPs of each layer: [forward, backward]. on_paper: creating a module raises."""
    return _on_paper(impl.benchmarking.flops.flops, sizes, batch, context, on_paper)


def bytes_moved(impl: Any, sizes: dict, batch: int, context: int, dtype: str, on_paper: bool = False) -> dict:
    return _on_paper(impl.benchmarking.roofline.bytes_moved, sizes, batch, context, on_paper, dtype=DTYPES[dtype])


def _on_paper(count: Any, sizes: dict, batch: int, context: int, on_paper: bool, **options: Any) -> dict:
    config = Config(**sizes)
    with without_models() if on_paper else contextlib.nullcontext():
        counted = count(config, batch=batch, context=context, **options)
    return {name: [counts["forward"], counts["backward"]] for name, counts in plain(counted).items()}


def roofline(impl: Any, sizes: dict, batch: int, context: int, dtype: str, peaks: tuple[float, float]) -> dict:
    """The fields of each bound, by "layer direction", for example "q_proj forward"."""
    module = impl.benchmarking.roofline
    bounds = module.roofline(
        Config(**sizes), batch=batch, context=context, dtype=DTYPES[dtype], device=module.Device("drawn", *peaks)
    )
    return {f"{name} {direction}": plain(b) for name, layer in bounds.items() for direction, b in layer.items()}


def mfu(impl: Any, step_flops: float, seconds: float, peaks: tuple[float, float]) -> float:
    module = impl.benchmarking.roofline
    return float(module.mfu(step_flops, seconds, module.Device("drawn", *peaks)))


def counted(impl: Any, sizes: dict, batch: int, context: int, dtype: str) -> dict:
    """FLOPs and bytes of each layer's matrix products in the real model, [forward, backward]. Does not call impl."""
    model = Transformer(Config(**sizes), attend=Attend()).to(DTYPES[dtype])
    calls: list[tuple[str, nn.Module, Any]] = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Product):
            layer.register_forward_hook(lambda layer, args, out, name=name: calls.append((name, layer, args)))
    tokens = torch.randint(sizes["vocabulary"], (batch, context))
    with torch.no_grad():
        model(tokens)
    flops: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    bytes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, layer, args in calls:  # repeat each call alone, to attribute its backward to the layer
        name = path.rpartition(".")[2]
        for direction, counter in enumerate(_forward_and_backward(layer.forward, args)):
            flops[name][direction] += counter.flops
            bytes[name][direction] += counter.bytes
    return {"flops": dict(flops), "bytes": dict(bytes)}


def _forward_and_backward(call: Any, args: Any) -> tuple[Counter, Counter]:
    args = [a.detach().requires_grad_() for a in args]
    with Counter() as forward:
        out = call(*args)
    with Counter() as backward:
        out.backward(torch.ones_like(out))
    return forward, backward


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Attend(nn.Module):
    """Plain attention with its two products as modules, so that they are counted separately."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = Product(), Product()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        scores = self.scores(q, k.mT) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.values(torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1), v)


class Counter(TorchDispatchMode):
    """Counts FLOPs and bytes of every matrix product inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] in PRODUCTS:
            a, b = args[-2:]
            self.flops += 2 * out.numel() * a.shape[-1]
            self.bytes += sum(t.numel() * t.element_size() for t in (a, b, out))
        return out
