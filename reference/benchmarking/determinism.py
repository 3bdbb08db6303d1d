"""Two runs, bit for bit the same: every source of chance seeded, every operator deterministic, and all put back."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy
import torch


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
    python, global_numpy = random.getstate(), numpy.random.get_state()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    timed = torch.backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.manual_seed(seed)  # of the CPU and of every CUDA device
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(global_numpy)
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
            torch.backends.cudnn.benchmark = timed
            if workspace is None:
                os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            else:
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
