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

    chain: layers, elements of each, and seconds of backward for each.
    """
    plain, wrapped, x = Chain(*chain), wrap(impl, kind, Chain(*chain), **options), torch.ones(chain[1])

    def naive() -> None:
        plain.zero_grad()
        plain(x).sum().backward()
        for weight in plain.weights:
            dist.all_reduce(weight.grad)

    def own() -> None:
        wrapped.zero_grad()
        wrapped(x).sum().backward()
        wrapped.finish_gradient_synchronization()

    return interleaved(naive, own, pairs, seed, dist.barrier)
