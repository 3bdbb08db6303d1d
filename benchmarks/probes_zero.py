"""What runs in the ranks of `benchmarks.zero`: steps of each wrapper in turn, and bytes of each."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.cluster.costs import sent_bytes
from lab.measure.memory import Held
from lab.ranks.group import ledger

from .side_by_side import Step, in_turn, model, tokens_of_rank, training_step


def wrappers(impl: Any) -> dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]]:
    """From a model to what computes its output, and what steps it."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4)

    def sharded(wrapped: nn.Module) -> tuple[nn.Module, Any]:
        return wrapped, adamw(wrapped.parameters())

    return {
        "torch DDP, AdamW": lambda m: sharded(nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)),
        "torch": lambda m: sharded(fully_sharded(m)),
        "fsdp_gather": lambda m: sharded(impl.zero.fsdp_gather.FSDP(m)),
        "fsdp_prefetch": lambda m: sharded(impl.zero.fsdp_prefetch.FSDPPrefetch(m)),
        "zero2": lambda m: (m, impl.zero.zero2.ZeRO2(m, torch.optim.AdamW, lr=1e-4)),
    }


def fully_sharded(plain: Any) -> nn.Module:
    """By torch: each block, and all the rest together, as its documentation has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in plain.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    return plain


def _step(make: Callable[[nn.Module], tuple[nn.Module, Any]]) -> Step:
    return training_step(*make(model()), *tokens_of_rank())


def seconds(impl: Any, rounds: int) -> dict[str, list[float]]:
    """Of each variant's steps, in turn."""
    return in_turn({name: _step(make) for name, make in wrappers(impl).items()}, rounds)


def bytes_of(impl: Any, name: str) -> dict[str, float]:
    """Of one variant's second step: held at most and after it, of every storage that torch operations met; and sent."""
    with Held() as memory:
        step = _step(wrappers(impl)[name])
        step()
        first = len(ledger.rows)
        memory.restart()
        step()
        told: dict[str, float] = {"peak": memory.peak, "kept": memory.now()}
    return {**told, "sent": sum(_sent(row) for row in ledger.rows[first:])}


def _sent(row: Any) -> float:
    """As handout/conventions.md counts; of a broadcast the mean over ranks, since each is the root of some."""
    world = len(row.group)
    return row.bytes * (world - 1) / world if row.op == "broadcast" else sent_bytes(row.op, row.bytes, world)
