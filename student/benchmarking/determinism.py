"""Bit-for-bit reproducible runs: seed all randomness, use deterministic operators, and restore everything after."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Make everything inside reproducible, bit for bit, for the same seed, machine and versions.

    Seed Python's `random`, numpy's global generator, and torch on the CPU and on every CUDA device. Let torch use
    deterministic algorithms only (an operator that has none raises RuntimeError). Stop cuDNN from choosing algorithms
    by timing them. Give cuBLAS a fixed workspace (CUBLAS_WORKSPACE_CONFIG=:4096:8, read when its first handle is made).
    At the end, also after an exception, restore all settings and random streams: numbers drawn afterwards do not depend
    on numbers drawn inside. seed: any int from 0 to 2⁶⁴ − 1, also beyond the 32 bits that numpy takes.
    Source: PyTorch documentation, "Reproducibility".
    """
    raise NotImplementedError(
        "benchmarking.determinism: Make everything inside reproducible, bit for bit, for the same seed, machine and …"
    )
