"""Training data for a small model: bytes of text, in batches that are the same on any mesh and after any restart.

A byte is a token, so there is no tokenizer to train, and the vocabulary is 256. Documents are *packed*: one after the
other, with a byte of 0 between them, so that no position of a sequence is padding. A batch is a function of seed and
step alone: whoever resumes at step 300, with whatever number of ranks, goes on with the batch that would have come.
Each rank takes its own share of it, as a distributed sampler would give it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
SEPARATOR = b"\0"


def texts(paths: Iterable[Path]) -> list[bytes]:
    """What the files hold, in the order of their names. Raises ValueError where there is nothing."""
    found = [path.read_bytes() for path in sorted(paths)]
    if not any(found):
        raise ValueError("expected files with text to train on, got none")
    return found


def packed(documents: Iterable[bytes]) -> Tensor:
    """Documents as tokens, (tokens,) int64, one after the other: b"ab" and b"c" are 97, 98, 0, 99."""
    return torch.frombuffer(bytearray(SEPARATOR.join(documents)), dtype=torch.uint8).long()


def sampler(count: int, *, rank: int, world: int, seed: int, epoch: int) -> list[int]:
    """This rank's samples of an epoch, of `count` in all: as many on each rank, none twice, another order each epoch.

    The order is a function of seed and epoch alone; the last count % world samples of it are left out. What torch's
    DistributedSampler does with drop_last, after set_epoch(epoch).
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed((seed << 32) + epoch))
    return order[rank : count - count % world : world].tolist()


def batch(corpus: Tensor, sequences: int, context: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, both (sequences, context): pieces of the corpus, and the same pieces one byte later.

    Raises ValueError where the corpus is shorter than one piece.
    """
    if len(corpus) <= context:
        raise ValueError(f"expected a text of more than {context} bytes, the context, got {len(corpus)}")
    generator = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(corpus) - context, (sequences,), generator=generator)
    pieces = corpus[starts[:, None] + torch.arange(context + 1)]  # (sequences, context + 1)
    return pieces[:, :-1], pieces[:, 1:]
