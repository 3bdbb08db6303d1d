"""Probes that call a collective on each rank for several cases, and return its inputs and outputs."""

import contextlib
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from lab.measure.memory import meter
from lab.ranks import gates
from lab.solution.wire import PerRank


def collect(impl, op: str, cases: PerRank, members: list) -> list:
    """Call `op` for cases[rank]; return the tensors of each case. members: the group's global ranks; []: all ranks."""
    rank = dist.get_rank()
    options = {"group": dist.new_group(members)} if members else {}
    if members and rank not in members:
        return []
    collected = []
    for i, case in enumerate(cases[rank]):
        tensors, call = prepare(impl, op, case)
        gates.mark(f"case {i}")
        call(options)
        collected.append(tensors)
    return collected


def large(impl, op: str, elements: int, seed: int, metered: bool = False) -> list | dict:
    """Call `op` once, with large tensors that each rank makes itself; return the block sums of the result, or with
    `metered` the memory meter's report."""
    tensors, call = prepare(impl, op, large_case(op, elements, seed, dist.get_rank(), dist.get_world_size()))
    existing = [t for v in tensors.values() for t in (v if isinstance(v, list) else [v])]
    with meter(existing) if metered else contextlib.nullcontext() as memory:
        call({})
    return memory.plain() if metered else [total for tensor in results(tensors) for total in blocks(tensor)]


def case_of(op: str, shape: list, world: int, draw: Callable[[list], torch.Tensor], src: int = 0) -> dict:
    """Return a case: inputs made by `draw`. shape: of the tensor, or of one part if the operation has parts."""
    full_shape = [world * n for n in shape[:1]] + shape[1:]
    if op == "all_to_all":
        return {"inputs": [draw(shape) for _ in range(world)], "shapes": [shape] * world}
    if op == "ring_all_gather":
        return {"tensor": draw(shape), "shape": full_shape}
    if op == "ring_reduce_scatter":
        return {"tensor": draw(full_shape), "shape": shape}
    return {"tensor": draw(shape), "src": src}


def large_case(op: str, elements: int, seed: int, rank: int, world: int) -> dict:
    """Return a case whose tensors or parts have `elements` elements; it is the same in every process."""
    seeds, src = itertools.count(seed), int(op == "broadcast")
    return case_of(op, [elements], world, lambda shape: whole_numbers(*shape, next(seeds), rank), src)


def results(tensors: dict) -> list:
    """Return the tensors that the call wrote."""
    written = tensors.get("outputs") or tensors.get("output", tensors.get("tensor"))
    return written if isinstance(written, list) else [written]


def whole_numbers(elements: int, seed: int, rank: int) -> torch.Tensor:
    """Return whole numbers, (elements,): they differ between ranks, and their sums are exact."""
    return torch.arange(elements, dtype=torch.float32).remainder_(1009 + 2 * rank).add_(seed)


def blocks(tensor: torch.Tensor) -> list:
    """Return the sums of blocks of 65,536 elements. A whole copy would disturb the caller's memory measurement."""
    return [float(part.double().sum()) for part in tensor.detach().split(1 << 16)]


def prepare(impl, op: str, case: dict):
    """Return the tensors of a case by name, and a function that calls `op` with them. Outputs start as garbage."""
    function = getattr(getattr(impl.ddp, op), op)
    if "tensor" in case:
        tensors, extra = {"tensor": case["tensor"]}, {"src": case["src"]} if case.get("src") else {}
        if "shape" in case:
            tensors = {"output": rubbish(case["shape"], case["tensor"].dtype), **tensors}
        return tensors, lambda o: function(*tensors.values(), **extra, **o)
    ins = case["inputs"]
    outs = [rubbish(shape, ins[0].dtype) for shape in case["shapes"]]
    tensors = {"outputs": outs, "inputs": ins}

    def call(options: dict) -> None:
        passed = [*outs]
        function(passed, ins, **options)
        tensors["replaced"] = [i for i, (a, b) in enumerate(zip(passed, outs, strict=True)) if a is not b]

    return tensors, call


def rubbish(shape: list, dtype: torch.dtype) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point else {torch.bool: True, torch.uint8: 77}.get(dtype, -77777)
    return torch.full(shape, value, dtype=dtype)
