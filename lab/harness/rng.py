"""Draws inputs and shapes at run time from a seed, which is public for students and secret for the grader."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy
import torch

T = TypeVar("T")


class Rng:
    """A stream of random draws, the same for the same seed and name."""

    def __init__(self, seed: str, name: str):
        digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
        self._draw = numpy.random.default_rng(list(digest))

    def integers(self, low: int, high: int) -> int:
        """An integer of low … high, both included."""
        return int(self._draw.integers(low, high + 1))

    def uniform(self, low: float, high: float) -> float:
        return float(self._draw.uniform(low, high))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integers(0, len(options) - 1)]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return [options[i] for i in self._draw.permutation(len(options))]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal values of the given shape."""
        return torch.from_numpy(self._draw.standard_normal(shape)).to(dtype)

    def tokens(self, *shape: int, vocabulary: int) -> torch.Tensor:
        """Token ids of 0 … vocabulary − 1, int64."""
        return torch.from_numpy(self._draw.integers(0, vocabulary, shape))
