"""Probes of `benchmarks.zero`: seconds and bytes of steps of each optimizer and each wrapper."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .side_by_side import RATE, Step, backward, fully_sharded, model, second_step, time_in_turn, tokens_of_rank


def optimizers(impl: Any) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """By name, functions that make an optimizer of parameters which already have gradients."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    adamw = torch.optim.AdamW
    return {
        "AdamW on every rank": lambda ps: adamw(ps, lr=RATE),
        "torch": lambda ps: ZeroRedundancyOptimizer(ps, adamw, lr=RATE),
        "torch, views": lambda ps: ZeroRedundancyOptimizer(ps, adamw, parameters_as_bucket_view=True, lr=RATE),
        "zero1": lambda ps: impl.zero.zero1.ShardedOptimizer(ps, adamw, lr=RATE),
        "split": lambda ps: impl.zero.split.SplitOptimizer(ps, adamw, lr=RATE),
    }


def optimizer_step(make: Callable[[Any], torch.optim.Optimizer], plain: nn.Module) -> Step:
    """Return a function that runs an optimizer step, with the same gradients each time."""
    for parameter in plain.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return make(list(plain.parameters())).step


def wrappers(impl: Any) -> dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]]:
    """By name, functions from a model to (wrapped model, optimizer)."""
    adamw = functools.partial(torch.optim.AdamW, lr=RATE)

    def sharded(wrapped: nn.Module) -> tuple[nn.Module, Any]:
        return wrapped, adamw(wrapped.parameters())

    return {
        "torch DDP, AdamW": lambda m: sharded(nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)),
        "torch": lambda m: sharded(fully_sharded(m)),
        "fsdp_gather": lambda m: sharded(impl.zero.fsdp_gather.FSDP(m)),
        "fsdp_prefetch": lambda m: sharded(impl.zero.fsdp_prefetch.FSDPPrefetch(m)),
        "zero2": lambda m: (m, impl.zero.zero2.ZeRO2(m, torch.optim.AdamW, lr=RATE)),
    }


def training_step(make: Callable[[nn.Module], tuple[nn.Module, Any]], plain: nn.Module) -> Step:
    """Return a function that runs forward, backward and AdamW on this rank's tokens."""
    tokens, targets = tokens_of_rank()
    wrapped, optimizer = make(plain)

    def step() -> None:
        optimizer.zero_grad()
        backward(wrapped, tokens, targets)
        optimizer.step()

    return step


KINDS = {"optimizer": (optimizers, optimizer_step), "training": (wrappers, training_step)}


def seconds(impl: Any, kind: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant's steps, taken in turn."""
    variants, step_of = KINDS[kind]
    return time_in_turn({name: step_of(make, model()) for name, make in variants(impl).items()}, rounds)


def bytes_of(impl: Any, kind: str, name: str) -> dict[str, float]:
    """Bytes held and sent in one variant's second step, as `second_step` returns them."""
    variants, step_of = KINDS[kind]
    return second_step(lambda: step_of(variants(impl)[name], model()))
