"""Builds the training stack from an implementation's own pieces, in two ways.

`MeshStack` comes from the last chapter: one transformer over all axes. `DataStack` comes from earlier chapters:
bucketed data parallelism, a sharded optimizer, clipping and checkpoints. Both use plain attention, or the
implementation's own. A stand-in can replace each piece, chosen by the id of its exercise.
"""

import argparse
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import standins
from ..course.assignment import default
from ..model.transformer import Attend, Config, Transformer, attention
from ..solution import impl as implementations
from ..standins import capstone

ADAM: dict[str, Any] = {"weight_decay": 0.1}
TILED = ("flash_attention.tiled_forward", "flash_attention.tiled_backward")  # attention on a CPU
FLASH = ("flash_attention.compiles_for_hopper",)  # attention on a GPU
DATA = ("ddp.bucketed", "zero.zero1", "ddp.clip_and_count", "zero.state_dict")


def pieces(stack: str, device: torch.device) -> list[str]:
    """Return the exercises of a stack ("data" or "mesh"), including attention on this device."""
    last = default().exercise("mesh.compose")
    mesh = (last.id, *last.needs, "mesh.global_norm", "mesh.mesh_checkpoint")
    return [*kernel(device), *(DATA if stack == "data" else mesh)]


def load(folder: Path, replace: Iterable[str]) -> ModuleType:
    """Load the implementation in a folder, with stand-ins for `replace`. Raises LookupError if there is no stand-in."""
    known = default()
    objects = [id for id in replace if id not in (*TILED, *FLASH)]  # `attend` handles these
    return implementations.load(folder, {known.exercise(id).object: _stand_in(id) for id in objects})


def _stand_in(id: str) -> Callable[[ModuleType], Any]:
    stage, _, name = id.partition(".")
    return getattr(capstone, f"{stage}_{name}", None) or pkgutil.resolve_name(standins.source(id))


def attend(impl: ModuleType, replace: Iterable[str], device: torch.device) -> Attend:
    """Return the implementation's attention, Triton on a GPU, PyTorch on a CPU; plain attention if it is replaced."""
    if set(kernel(device)) & set(replace):
        return attention
    if device.type == "cuda":
        return impl.flash_attention.attention.FlashAttention.apply
    backward = impl.flash_attention.tiled_backward.tiled_backward

    class Tiled(impl.flash_attention.tiled_forward.TiledAttention):  # type: ignore[name-defined,misc]
        @staticmethod
        def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
            return (*backward(*ctx.saved_tensors, do, ctx.is_causal), None)

    return lambda q, k, v, is_causal: Tiled.apply(q, k, v, is_causal)


def kernel(device: torch.device) -> tuple[str, ...]:
    """Return the ids of the exercises of attention on a device."""
    return FLASH if device.type == "cuda" else TILED


class MeshStack:
    """The implementation's mesh, `parallelize`, `train_step`, clipping and checkpoints."""

    def __init__(self, impl: Any, options: argparse.Namespace, config: Config, attend: Attend, device: torch.device):
        self.impl, self.options = impl, options
        self.mesh = impl.mesh.mesh.Mesh(**options.mesh)
        model = Transformer(config, attend)
        if options.experts:
            impl.mesh.parallel.to_moe(model, options.experts, options.k)
        plan = impl.mesh.parallel.Plan(
            micro_batches=options.micro_batches, schedule=options.schedule, chunks=options.chunks,
            sequence=options.sequence, fsdp=options.fsdp, dropout=options.dropout, seed=options.seed,
        )  # fmt: skip
        self.model = impl.mesh.compose.parallelize(model.to(device), self.mesh, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, **ADAM)
        self.checkpoint = impl.mesh.mesh_checkpoint.MeshCheckpoint(options.folder / "checkpoint")

    def share(self, batch: Tensor) -> Tensor:
        """Return this rank's sequences of a batch."""
        return self.impl.mesh.parallel.share(batch, self.mesh)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Train one step on this rank's share. Return the mean loss over the whole batch."""
        return self.impl.mesh.compose.train_step(
            self.model, self.optimizer, tokens, targets,
            clip=lambda parallel: self.impl.mesh.global_norm.clip_global_norm(parallel, self.options.clip),
        )  # fmt: skip


class DataStack:
    """Replicas with bucketed gradients, a sharded AdamW, clipping, and checkpoints of a sharded state."""

    def __init__(self, impl: Any, options: argparse.Namespace, config: Config, attend: Attend, device: torch.device):
        self.impl, self.options = impl, options
        self.model = Transformer(config, attend).to(device)
        self.replica = impl.ddp.bucketed.BucketedDDP(self.model, bucket_bytes=1 << 20)
        self.optimizer = impl.zero.zero1.ShardedOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=options.lr, **ADAM
        )
        self.checkpoint = impl.zero.state_dict.Checkpoint(options.folder / "checkpoint")

    def share(self, batch: Tensor) -> Tensor:
        """Return this rank's sequences of a batch. `lab.train.loop.parse` checks that the ranks divide it evenly."""
        return batch.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Train one step on this rank's share. Return the mean loss over the whole batch."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.replica(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        self.replica.finish_gradient_synchronization()
        self.impl.ddp.clip_and_count.clip_gradient_norm(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        mean = loss.detach() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        return mean.item()
