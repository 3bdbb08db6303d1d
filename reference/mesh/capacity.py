"""A limit on what an expert takes: what is above it is dropped, counted, and goes around the layer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Capped:
    """A routing within its capacity."""

    experts: Tensor  # (tokens, k) int64: as before, −1 where the choice was dropped
    dropped: Tensor  # (n,) int64: how many choices of each expert were
    limit: int  # the most that an expert takes from these tokens


def capacity(experts: Tensor, n: int, factor: float) -> Capped:
    """Keep at most ⌈factor · tokens · k / n⌉ choices of each expert; drop and count the others.

    experts: (tokens, k) int64, of 0 … n − 1, a token's first choice first: what `route` chose for this rank's tokens.
    The limit is that of one rank's tokens: with R ranks an expert is given at most R times as many, whatever the
    routing, and nothing is sent to find out. First choices come before second ones: of each expert's, those of the
    lowest tokens are kept, and second choices take what room is left, in the same order. factor 1 keeps all of a
    routing that is perfectly even; n/k and more can drop nothing where no token chooses an expert twice.

    Deterministic, and without a loop over tokens. Raises ValueError unless factor > 0.
    Source: Lepikhin et al. 2020, "GShard", algorithm 1; Fedus, Zoph and Shazeer 2021, equation 3.
    """
    if not factor > 0:
        raise ValueError(f"expected factor > 0, got {factor}")
    tokens, k = experts.shape
    limit = math.ceil(factor * tokens * k / n)
    by_choice = experts.T.flatten()  # (k · tokens,): all first choices, then all second ones
    takes = (by_choice[:, None] == torch.arange(n, device=experts.device)).long()  # (k · tokens, n)
    place = (takes.cumsum(0) * takes).sum(1)  # (k · tokens,): 1 for who comes first to its expert
    kept = place <= limit
    dropped = (takes * ~kept[:, None]).sum(0)  # (n,)
    return Capped(by_choice.where(kept, -1).view(k, tokens).T.contiguous(), dropped, limit)
