"""What runs in the ranks of `benchmarks.zero`: steps of each optimizer and each wrapper in turn, and bytes of each."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.measure.memory import Held
from lab.model.transformer import Transformer
from lab.world.group import ledger

from .probes_ddp import CONFIG, _copy, _loss

RATE = 1e-4
Step = Callable[[], object]


def optimizers(impl: Any) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """From parameters to what steps them; gradients are there."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    adamw = torch.optim.AdamW
    return {
        "AdamW on every rank": lambda ps: adamw(ps, lr=RATE),
        "torch": lambda ps: ZeroRedundancyOptimizer(ps, adamw, lr=RATE),
        "torch, views": lambda ps: ZeroRedundancyOptimizer(ps, adamw, parameters_as_bucket_view=True, lr=RATE),
        "zero1": lambda ps: impl.zero.zero1.ShardedOptimizer(ps, adamw, lr=RATE),
        "split": lambda ps: impl.zero.split.SplitOptimizer(ps, adamw, lr=RATE),
    }


def optimizer_step(make: Callable[[Any], torch.optim.Optimizer], model: nn.Module) -> Step:
    """A step with the same gradients each time."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return make(list(model.parameters())).step


def wrappers(impl: Any) -> dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]]:
    """From a model to what computes its output, and what steps it."""
    adamw = functools.partial(torch.optim.AdamW, lr=RATE)

    def sharded(wrapped: nn.Module) -> tuple[nn.Module, Any]:
        return wrapped, adamw(wrapped.parameters())

    return {
        "torch DDP, AdamW": lambda m: sharded(nn.parallel.DistributedDataParallel(m)),
        "torch": lambda m: sharded(_fully_shard(m)),
        "fsdp_gather": lambda m: sharded(impl.zero.fsdp_gather.FSDP(m)),
        "fsdp_prefetch": lambda m: sharded(impl.zero.fsdp_prefetch.FSDPPrefetch(m)),
        "zero2": lambda m: (m, impl.zero.zero2.ZeRO2(m, torch.optim.AdamW, lr=RATE)),
    }


def training_step(make: Callable[[nn.Module], tuple[nn.Module, Any]], model: nn.Module) -> Step:
    """Forward, backward and AdamW, with this rank's tokens."""
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = torch.randint(CONFIG.vocabulary, (2, 1, 32)).unbind()
    wrapped, optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        _loss(wrapped, tokens, targets).backward()
        if hasattr(wrapped, "finish_gradient_synchronization"):
            wrapped.finish_gradient_synchronization()
        optimizer.step()

    return step


KINDS = {"optimizer": (optimizers, optimizer_step), "training": (wrappers, training_step)}


def seconds(impl: Any, kind: str, rounds: int) -> dict[str, list[float]]:
    """Of each variant's steps, in turn."""
    plain, (variants, step_of) = _model(), KINDS[kind]
    steps = {name: step_of(make, _copy(plain)) for name, make in variants(impl).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 3):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    return times


def bytes_of(impl: Any, kind: str, name: str) -> dict[str, float]:
    """Of one variant's second step: held at most, held at its end, and sent by a rank on average."""
    variants, step_of = KINDS[kind]
    with Held() as memory:
        step = step_of(variants(impl)[name], _model())
        step()
        first = len(ledger.rows)
        memory.restart()
        step()
        told: dict[str, float] = {"peak": memory.peak, "kept": memory.now()}
    return {**told, "sent": sum(_sent(row) for row in ledger.rows[first:])}


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def _fully_shard(model: Any) -> nn.Module:
    """Each block, and all the rest together, as torch's documentation has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _sent(row: Any) -> float:
    """Bytes as handout/conventions.md counts them; of a broadcast, the mean over ranks."""
    others = len(row.group) - 1
    shares = {"all_reduce": 2 * others / (others + 1), "broadcast": others / (others + 1), "barrier": 0}
    return shares.get(row.op, others) * row.bytes
