"""A limit on the tokens of each expert: choices beyond it are dropped and counted; the residual carries them on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Capped:
    """A routing within the capacity of its experts."""

    experts: Tensor  # (tokens, k) int64: as before, −1 where the choice was dropped
    dropped: Tensor  # (n,) int64: how many choices of each expert were
    limit: int  # the most that an expert takes from these tokens


def capacity(experts: Tensor, n: int, factor: float) -> Capped:
    """Keep at most ⌈factor · tokens · k / n⌉ choices of each expert; drop and count the others.

    experts: (tokens, k) int64, from 0 to n − 1, a token's first choice first, as `route` chose them for this rank's
    tokens. The limit applies to the tokens of one rank: with R ranks an expert gets at most R times as many, for any
    routing, and no message is needed. First choices come before second choices. Among the first choices of an expert,
    keep those of the lowest tokens; second choices fill the remaining places in the same order. factor 1 keeps every
    choice of a perfectly even routing. A factor of n/k or more drops nothing if no token chooses an expert twice.

    The result is deterministic, without a loop over tokens. Raises ValueError unless factor > 0.
    Source: Lepikhin et al. 2020, "GShard", algorithm 1; Fedus, Zoph and Shazeer 2021, equation 3.
    """
    if not factor > 0:
        raise ValueError(f"expected factor > 0, got {factor}")
    tokens, k = experts.shape
    limit = math.ceil(factor * tokens * k / n)
    by_choice = experts.T.flatten()  # (k · tokens,): all first choices, then all second ones
    takes = (by_choice[:, None] == torch.arange(n, device=experts.device)).long()  # (k · tokens, n)
    position = (takes.cumsum(0) * takes).sum(1)  # (k · tokens,): 1 for who comes first to its expert
    kept = position <= limit
    dropped = (takes * ~kept[:, None]).sum(0)  # (n,)
    return Capped(by_choice.where(kept, -1).view(k, tokens).T.contiguous(), dropped, limit)
