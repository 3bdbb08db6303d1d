"""A limit on what an expert takes: what is above it is dropped, counted, and goes around the layer."""

from dataclasses import dataclass

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
    raise NotImplementedError("mesh.capacity: Keep at most ⌈factor · tokens · k / n⌉ choices of each expert")
