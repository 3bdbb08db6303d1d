"""Probes of the extensions: ranks of different speed, every random number generator, CUDA graphs."""

import os
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness.calls import plain
from lab.harness.raising import raised
from lab.solution.wire import PerRank


def straggler(impl: Any, samples: PerRank, members: list[int]) -> dict:
    """Each rank has its own samples. members: ranks of the group; empty for the world."""
    group = dist.new_group(members) if members else None
    rank = dist.get_rank()
    if members and rank not in members:
        return {}
    return plain(impl.benchmarking.straggler.find_straggler(samples[rank], group))


SOURCES = ("python", "numpy", "torch", "dropout", "shuffle", *["cuda"] * torch.cuda.is_available())


def drawn(n: int) -> dict:
    """Draw random numbers from every generator."""
    items = [*range(n)]
    random.shuffle(items)
    return {
        "python": [random.random() for _ in range(n)],
        "numpy": [float(v) for v in numpy.random.standard_normal(n)],
        "torch": torch.randn(n),
        "dropout": torch.nn.functional.dropout(torch.ones(4 * n)),
        "shuffle": items + torch.randperm(n).tolist(),
        "cuda": torch.randn(n, device="cuda").cpu() if "cuda" in SOURCES else None,
    }


def runs(impl: Any, seed: int, other_seed: int, n: int) -> dict:
    """Two runs with the same seed, with random numbers drawn between them, and one run with another seed."""
    reproducible = impl.benchmarking.determinism.reproducible
    results = []
    for s in (seed, seed, other_seed):
        with reproducible(s):
            results.append(drawn(n))
        drawn(3)
    return {"first": results[0], "second": results[1], "other": results[2]}


def block_effects(impl: Any, seed: int, enter: bool, broken: bool) -> dict:
    """Settings inside and after the block, and numbers drawn after it. enter: use the block; broken: raise in it."""
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    torch.backends.cudnn.benchmark = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if not broken:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    drawn(5)
    active = None
    if enter:
        try:
            with impl.benchmarking.determinism.reproducible(seed):
                active = settings()
                drawn(7)
                if broken:
                    raise InterruptedError
        except InterruptedError:
            pass
    after = settings()
    return {"within": active, "after": after, "drawn": drawn(6)}


def settings() -> dict:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.benchmark": bool(torch.backends.cudnn.benchmark),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def graphed(impl: Any, x: Tensor, weight: Tensor, batches: list[Tensor]) -> dict:
    """Capture a chain of small products as a CUDA graph and call it on several inputs: results, calls, errors."""
    calls = []

    def step(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(torch.cuda.current_stream() != torch.cuda.default_stream())
        for _ in range(20):
            x = torch.tanh(x @ weight)
        return x

    x, weight, batches = x.cuda(), weight.cuda(), [m.cuda() for m in batches]
    graph = impl.benchmarking.cuda_graph.GraphedStep(step, x, weight, warmup=2)
    recorded, on_side_stream = len(calls), all(calls)
    outputs = [graph(m, weight) for m in batches]
    replayed = len(calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        graph(batches[0], weight)
        torch.cuda.synchronize()
    products = sum(e.name in ("aten::mm", "aten::matmul") for e in profile.events())
    invalid = [(batches[0][:1], weight), (batches[0],), (batches[0].half(), weight)]
    refused = [raised(lambda o=other: graph(*o)) for other in invalid]
    expected = [step(m, weight) for m in batches]
    refused.append(raised(lambda: impl.benchmarking.cuda_graph.GraphedStep(torch.neg, torch.ones(2))))
    return {
        "outputs": [o.cpu() for o in outputs], "expected": [e.cpu() for e in expected], "recorded": recorded,
        "later": replayed, "products": products, "refused": refused, "aside": on_side_stream,
    }  # fmt: skip
