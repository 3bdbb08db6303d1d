"""Bit-for-bit reproducible runs: seed all randomness, use deterministic operators, and restore everything after."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy
import torch


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
