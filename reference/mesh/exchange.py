"""A differentiable all-to-all: the gradient of a row goes back to the rank that sent the row."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send the first sent[0] rows to rank 0 of `group`, the next sent[1] to rank 1, …; return received rows by rank.

    rows: (Σ sent, …), any dtype, also integers, contiguous or not. sent, received: number of rows per rank of the
    group, including this rank; numbers may be 0. received[s] on rank r equals sent[r] on rank s. Returns
    (Σ received, …), the rows of rank 0 first. Use one `all_to_all_single` over the group. Every rank takes part, also
    one with nothing to send. Backward uses one more, with `sent` and `received` swapped, so each row's gradient returns
    to the rank that sent the row. group: if None, or of one rank, nothing is sent, and the rows are the result.

    Raises ValueError, before anything is sent, unless there is one number per rank and `sent` adds up to the rows.
    """
    world = 1 if group is None else dist.get_world_size(group)
    if not len(sent) == len(received) == world or sum(sent) != len(rows):
        raise ValueError(
            f"expected {world} numbers to send and to receive, the first adding up to {len(rows)} rows, "
            f"got sent={list(sent)}, received={list(received)}"
        )
    return rows if world == 1 else _Exchange.apply(rows, list(sent), list(received), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradients[0], *ctx.way_back), None, None, None
