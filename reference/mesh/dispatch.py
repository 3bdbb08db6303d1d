"""Send tokens to their experts: to the right rank by an all-to-all, then in the order of experts."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lab.dryrun import even, host
from lab.provided import provided

from .exchange import exchange


@provided
@dataclass(frozen=True)
class Dispatched:
    """The rows for this rank's experts, and the data that `combine` needs to send results back.

    An assignment is one choice of one token; choice c of token t is number t·k + c of this rank's tokens·k.
    """

    tokens: Tensor  # (arrived, width), grouped by expert, in the order of `counts`
    counts: list[int]  # rows for each of this rank's experts
    order: Tensor  # (left,) int64: the assignments whose tokens left, in the order they did
    regroup: Tensor  # (arrived,) int64: tokens[i] arrived as row regroup[i]
    sent: list[int]  # rows to each rank of the group
    received: list[int]  # rows from each rank of the group


@provided
def balanced(choices: int, n: int, group: dist.ProcessGroup | None) -> list[list[list[int]]]:
    """Counts of an even routing, equal on all ranks, for `host`: rows to each rank for each of its n/E experts, and
    rows from each rank for each of this rank's. choices: tokens · k of one rank."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    counts, each = even(choices, n), n // world
    leave = [counts[first : first + each] for first in range(0, n, each)]
    return [leave, [leave[rank]] * world]


def dispatch(x: Tensor, experts: Tensor, n: int, *, group: dist.ProcessGroup | None = None) -> Dispatched:
    """Send each token to the ranks of its experts, however uneven the routing; no token is dropped or padded.

    x: (tokens, width), any floating dtype; rows are sent in this dtype. experts: (tokens, k) int64, from 0 to n − 1; −1
    is a dropped choice, which is not sent. group: the E ranks that hold the n experts; rank e holds experts e·n/E to
    (e+1)·n/E − 1. None: this process holds all experts, and nothing is sent.

    `exchange` sends the number of rows for each expert (n int64, one all-to-all with n/E numbers per rank), then the
    rows, by one all-to-all with one row for each choice that was not dropped. Backward has one more, with a gradient
    for each row that arrived. Rows leave ordered by expert, then by assignment. The result is ordered by expert, then
    by source rank, then as sent, so it has the same bits every time. A rank may send nothing, and an expert may receive
    nothing. If you read counts by `lab.dryrun.host`, once, `lab dryrun` can run this function with those of `balanced`.

    Raises ValueError unless E divides n.
    Source: Lepikhin et al. 2020, "GShard"; dropless: Gale et al. 2022, "MegaBlocks".
    """
    world = 1 if group is None else dist.get_world_size(group)
    if n % world:
        raise ValueError(f"expected a number of experts that {world} ranks divide, got {n}: each rank holds as many")
    chosen = experts.flatten()  # (tokens · k,)
    counts = torch.zeros(n + 1, dtype=torch.int64, device=x.device)  # the dropped, then each expert
    counts = counts.scatter_add(0, chosen + 1, torch.ones_like(chosen))[1:]
    each = [n // world] * world
    arriving = exchange(counts, each, each, group)  # (n,): from each rank, for each of this rank's experts
    # The host must know, and waits for the device; once for both.
    leave, arrive = host(torch.stack([counts, arriving]).view(2, world, -1), balanced(len(chosen), n, group))
    sent, received = [sum(to) for to in leave], [sum(source) for source in arrive]

    order = chosen.argsort(stable=True)[len(chosen) - sum(sent) :]  # dropped ones come first
    # A copy for each choice: in backward each adds to a row of its own, so that sums have one order on a GPU too.
    leaving = x.repeat_interleave(experts.shape[1], dim=0)[order]  # (left, width)
    arrived = exchange(leaving, sent, received, group)  # (arrived, width)

    expert = torch.arange(n // world, device=x.device).repeat(world)  # (n,): whom each number of `arriving` is for
    regroup = expert.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
    return Dispatched(
        arrived[regroup], [sum(rows) for rows in zip(*arrive, strict=True)], order, regroup, sent, received
    )
