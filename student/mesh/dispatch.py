"""Tokens to their experts: by rank, over an all-to-all, then by expert."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lab.dryrun import even
from lab.provided import provided


@provided
@dataclass(frozen=True)
class Dispatched:
    """What this rank's experts are given, and what `combine` needs to bring it home.

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
    """What `host` is to say of an even routing, on all ranks alike: rows to each rank for each of its n/E experts, and
    rows from each rank for each of this rank's. choices: tokens · k of one rank."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    counts, each = even(choices, n), n // world
    leave = [counts[first : first + each] for first in range(0, n, each)]
    return [leave, [leave[rank]] * world]


def dispatch(x: Tensor, experts: Tensor, n: int, *, group: dist.ProcessGroup | None = None) -> Dispatched:
    """Send each token to the ranks that hold its experts, however uneven that is: no token is dropped or padded.

    x: (tokens, width), any floating dtype, which is also the dtype that is sent. experts: (tokens, k) int64, of 0 …
    n − 1; −1 is a choice that was dropped, for which nothing is sent. group: the E ranks over which the n experts are
    spread, rank e holding experts e·n/E … (e+1)·n/E − 1; None: this process holds all of them, and nothing is sent.

    Sent are, by `exchange`: how many rows there are for each expert (n int64, one all-to-all of n/E to each rank), then
    the rows, one all-to-all of one row for each choice that was not dropped; in backward one more, of a gradient for
    each row that arrived. Rows leave ordered by expert, then by assignment; they are handed over ordered by expert,
    then by the rank they came from, then as they left: the same bits every time. A rank may send nothing, and an expert
    may be given nothing. Counts are read once, by `lab.dryrun.host`, which a dry run gives `balanced` ones.

    Raises ValueError unless E divides n.
    Source: Lepikhin et al. 2020, "GShard"; dropless: Gale et al. 2022, "MegaBlocks".
    """
    raise NotImplementedError(
        "mesh.dispatch: Send each token to the ranks that hold its experts, however uneven that is"
    )
