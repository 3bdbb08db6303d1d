"""Training data for a small model: bytes of text, in batches that are the same on any mesh and after any restart.

A byte is a token, so there is no tokenizer to train, and the vocabulary is 256. Documents are *packed*: one after the
other, with a byte of 0 between them, so that no position of a sequence is padding. A batch depends only on seed and
step: a run that resumes at step 300, with any number of ranks, gets the same batch as without the interruption. Each
rank takes its own share, as with a distributed sampler.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
SEPARATOR = b"\0"


def texts(paths: Iterable[Path]) -> list[bytes]:
    """Return the contents of the files, in the order of their paths. Raises ValueError if there is no text."""
    found = [path.read_bytes() for path in sorted(paths)]
    if not any(found):
        raise ValueError("expected files with text to train on, got none")
    return found


def packed(documents: Iterable[bytes]) -> Tensor:
    """Return all documents as tokens, (tokens,) int64: b"ab" and b"c" give 97, 98, 0, 99."""
    return torch.frombuffer(bytearray(SEPARATOR.join(documents)), dtype=torch.uint8).long()


def sampler(count: int, *, rank: int, world: int, seed: int, epoch: int) -> list[int]:
    """Return this rank's samples of an epoch, of `count`: the same number per rank, none twice, a new order per epoch.

    The order depends only on seed and epoch. The last count % world samples are dropped. torch's DistributedSampler
    does the same with drop_last, after set_epoch(epoch).
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed((seed << 32) + epoch))
    return order[rank : count - count % world : world].tolist()


def batch(corpus: Tensor, sequences: int, context: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, both (sequences, context): pieces of the corpus, and the same pieces one byte later.

    Raises ValueError if the corpus is shorter than one piece.
    """
    if len(corpus) <= context:
        raise ValueError(f"expected a text of more than {context} bytes, the context, got {len(corpus)}")
    generator = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(corpus) - context, (sequences,), generator=generator)
    pieces = corpus[starts[:, None] + torch.arange(context + 1)]  # (sequences, context + 1)
    return pieces[:, :-1], pieces[:, 1:]
