"""What the tests of collectives share: drawn tensors, groups that are not the world, and what a ledger may hold."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "int64": torch.int64}
P2P = {"send", "recv"}


def draw(rng, *shape: int, dtype: str = "float32") -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype, in any order."""
    return (rng.normal(*shape) * 4).round().to(DTYPES[dtype])


def halves(rng, world: int) -> list[list[int]]:
    """Two groups that share the ranks, in an order of their own."""
    order = rng.shuffled(range(world))
    return [sorted(order[:2]), sorted(order[2:])]


def group_of(rank: int, groups: list[list[int]], world: int) -> list[int]:
    return next((g for g in groups if rank in g), [*range(world)])


def only_messages(rank: int, rows: list[dict]) -> None:
    other = sorted({r["op"] for r in rows} - P2P)
    assert not other, f"rank {rank} issued {', '.join(other)}: sends and receives are all there is"


def sends(rows: list[dict]) -> list[dict]:
    return [r for r in rows if r["op"] == "send"]
