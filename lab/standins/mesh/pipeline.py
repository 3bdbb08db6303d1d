"""Stand-ins for the pipeline: schedules and their execution. Each is correct, but slower or with more memory."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.schedule import KINDS, Action


def schedule_gpipe(module: ModuleType) -> Callable[..., list[Action]]:
    """Finishes one micro-batch before the next begins: correct, but all ranks except one wait."""
    return _schedule(lambda count, chunks: [Action(kind, i) for i in range(count) for kind in KINDS])


def schedule_1f1b(module: ModuleType) -> Callable[..., list[Action]]:
    """Schedules all forwards, then all backwards, as GPipe: as fast as 1F1B, but keeps all activations."""
    return schedule_interleaved(module)


def schedule_interleaved(module: ModuleType) -> Callable[..., list[Action]]:
    """Schedules all forwards, chunk by chunk, then all backwards: correct, but keeps all activations."""
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
    """Runs one micro-batch at a time, whatever the schedule: correct, but all ranks except one wait."""

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
        local_chunks = list(zip(range(rank, last + 1, world), chunks, strict=True))
        total = None
        for i in range(count):
            saved: dict[int, tuple[Tensor, Tensor]] = {}
            local: Tensor | None = None
            for index, chunk in local_chunks:
                x = inputs[i] if index == 0 else _receive(message_spec, local, index - 1, world, group).requires_grad_()
                output = chunk(x)
                if index == last:
                    output = loss_fn(output, targets[i]) / count
                    total = output.detach() if total is None else total + output.detach()
                else:
                    local = _send(output.detach(), index + 1, world, group)
                saved[index] = x, output
            for index, _ in reversed(local_chunks):
                x, output = saved.pop(index)
                torch.autograd.backward(
                    output, None if index == last else _receive(message_spec, local, index + 1, world, group)
                )
                if index:
                    local = _send(x.grad, index - 1, world, group)  # type: ignore[arg-type]
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
