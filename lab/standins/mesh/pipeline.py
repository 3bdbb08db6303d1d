"""Stand-ins for the pipeline: schedules and their execution."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.schedule import KINDS, Action


def schedule_gpipe(module: ModuleType) -> Callable[..., list[Action]]:
    """Forward and backward of one micro-batch, then of the next: complete, but all other ranks wait."""
    return _schedule(lambda count, chunks: [Action(kind, i) for i in range(count) for kind in KINDS])


def schedule_1f1b(module: ModuleType) -> Callable[..., list[Action]]:
    """All forwards, then all backwards: equally fast, but keeps all activations."""
    return schedule_interleaved(module)


def schedule_interleaved(module: ModuleType) -> Callable[..., list[Action]]:
    """All forwards of the first chunk, then of the next, then all backwards: keeps all activations."""
    return _schedule(
        lambda count, chunks: [
            *(Action("forward", i, chunk) for chunk in range(chunks) for i in range(count)),
            *(Action("backward", i, chunk) for chunk in reversed(range(chunks)) for i in range(count)),
        ]
    )


def _schedule(order: Callable[[int, int], list[Action]]) -> Callable[..., list[Action]]:
    def schedule(rank: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Action]:
        if not (0 <= rank < stages and micro_batches >= 1 and chunks >= 1) or (chunks > 1 and micro_batches % stages):
            raise ValueError(f"no rank {rank} of {stages}, or {micro_batches} micro-batches for {chunks} chunks")
        return order(micro_batches, chunks)

    return schedule


def execute(module: ModuleType) -> Callable[..., Tensor | None]:
    """Runs one micro-batch after the other, whatever the schedule: right, but all ranks except one wait."""

    def execute(
        actions: Sequence[Action],
        chunks: Sequence[nn.Module],
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_fn: Callable[[Tensor, Any], Tensor],
        message_spec: Tensor,
        group: Any = None,
        tied: nn.Parameter | None = None,
    ) -> Tensor | None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        count, last = 1 + max(a.micro_batch for a in actions), world * len(chunks) - 1
        stages = list(zip(range(rank, last + 1, world), chunks, strict=True))
        total = None
        for i in range(count):
            saved: dict[int, tuple[Tensor, Tensor]] = {}
            local: Tensor | None = None
            for stage, chunk in stages:
                x = inputs[i] if stage == 0 else _receive(message_spec, local, stage - 1, world, group).requires_grad_()
                output = chunk(x)
                if stage == last:
                    output = loss_fn(output, targets[i]) / count
                    total = output.detach() if total is None else total + output.detach()
                else:
                    local = _send(output.detach(), stage + 1, world, group)
                saved[stage] = x, output
            for stage, _ in reversed(stages):
                x, output = saved.pop(stage)
                torch.autograd.backward(
                    output, None if stage == last else _receive(message_spec, local, stage + 1, world, group)
                )
                if stage:
                    local = _send(x.grad, stage - 1, world, group)  # type: ignore[arg-type]
        if tied is not None and world > 1 and tied.grad is not None:
            peer, remote = world - 1 - rank, torch.empty_like(tied.grad)
            sent = dist.isend(tied.grad, group=group, group_dst=peer)
            dist.recv(remote, group=group, group_src=peer)
            assert sent is not None
            sent.wait()
            tied.grad += remote
        return total

    return execute


def _send(tensor: Tensor, target: int, world: int, group: Any) -> Tensor:
    if world > 1:
        dist.send(tensor.contiguous(), group=group, group_dst=target % world)
    return tensor


def _receive(spec: Tensor, local: Tensor | None, source: int, world: int, group: Any) -> Tensor:
    if world == 1:
        assert local is not None
        return local
    arriving = torch.empty_like(spec)
    dist.recv(arriving, group=group, group_src=source % world)
    return arriving
