"""Two runs, bit for bit the same: every source of chance seeded, every operator deterministic, and all put back."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """What runs within is the same, bit for bit, for the same seed, on the same machine and versions.

    Seeds Python's `random`, numpy's global generator, and torch on the CPU and on every CUDA device; lets torch use
    deterministic algorithms only (an operator that has none raises RuntimeError), cuDNN not choose algorithms by timing
    them, and cuBLAS use a fixed workspace (CUBLAS_WORKSPACE_CONFIG=:4096:8, read when its first handle is made). On
    leaving, by an exception too, all of this is as it was before, the random streams included: what is drawn afterwards
    does not depend on what was drawn within. seed: any int from 0 on, also one beyond the 32 bits that numpy takes.
    Source: PyTorch documentation, "Reproducibility".
    """
    raise NotImplementedError(
        "benchmarking.determinism: What runs within is the same, bit for bit, for the same seed, on the same machine …"
    )
