"""What runs on a link beside the clock: a backward pass that takes the time it is told to, reduced in two ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.measure.clock import sleep
from lab.measure.compare import interleaved

from .probes import wrap


class Slow(torch.autograd.Function):
    """y = x; backward takes `seconds`, and no core: so ranks that share cores do not disturb each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sleep(ctx.seconds)
        return gradient, None


class Chain(nn.Module):
    """y = x · w₁ · w₂ · …, elementwise; each layer's gradient is there `seconds` after that of the layer above."""

    def __init__(self, layers: int, elements: int, seconds: float):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(elements)) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Slow.apply(x * weight, self.seconds)
        return x


def against_naive(impl: Any, kind: str, options: dict, chain: tuple, pairs: int, seed: int) -> tuple:
    """Seconds of a backward pass and its synchronization: by a blocking all-reduce a parameter after it, and by `kind`.

    chain: layers, elements of each, and seconds of backward for each. Every pass has inputs of its own, which are its
    gradients. Also the worst error of a gradient by `kind`.
    """
    plain, model, rank = Chain(*chain), Chain(*chain), dist.get_rank()
    wrapped, worst = wrap(impl, kind, model, **options), [0.0]
    draws = [torch.Generator().manual_seed(seed + r) for r in range(dist.get_world_size())]
    inputs: list[Tensor] = []

    def ready() -> None:
        inputs[:] = [torch.rand(chain[1], generator=draw) for draw in draws]  # of all ranks, on each
        dist.barrier()

    def naive() -> None:
        plain.zero_grad()
        plain(inputs[rank]).sum().backward()
        for weight in plain.weights:
            dist.all_reduce(weight.grad)

    def own() -> None:
        wrapped.zero_grad()
        wrapped(inputs[rank]).sum().backward()
        wrapped.finish_gradient_synchronization()

    def check(which: int) -> None:
        if which == 1:
            mean = torch.stack(inputs).mean(0)
            worst.extend(float((w.grad - mean).abs().max()) for w in model.weights)

    ready()
    return (*interleaved(naive, own, pairs, seed, ready, check), float(torch.tensor(worst).max()))
