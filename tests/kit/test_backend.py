"""All operations of torch's process groups work on the probes' backend, with the results of a single process."""

import itertools

import pytest
import torch

from .probes_backend import CASES, WORLD, cases, impossible, rank_input, reduced, wire_value

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("uint8", "int8", "int16", "int32", "int64")
MOVED = ["float16", "bfloat16", "float64", *INTS, "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
MOVES = ["all_gather", "from one", "uneven all_to_all"]
REDUCED = {  # by reduction: (supported dtypes, oracle)
    "SUM": ((*FLOATS, *INTS, "complex64"), lambda x: x.sum(0)),
    "AVG": (FLOATS, lambda x: x.sum(0) / WORLD),
    "MIN": ((*FLOATS, *INTS, "bool"), lambda x: x.amin(0)),
    "MAX": ((*FLOATS, *INTS, "bool"), lambda x: x.amax(0)),
    "PRODUCT": ((*FLOATS, *INTS), lambda x: x.prod(0)),
    "BAND": ((*INTS, "bool"), lambda x: x[0] & x[1] & x[2] & x[3]),
    "BOR": ((*INTS, "bool"), lambda x: x[0] | x[1] | x[2] | x[3]),
    "BXOR": ((*INTS, "bool"), lambda x: x[0] ^ x[1] ^ x[2] ^ x[3]),
    "PREMUL_SUM": (FLOATS, lambda x: (2 * x).sum(0)),
}


def inputs(dtype: str) -> list[torch.Tensor]:
    return [rank_input(r, dtype=getattr(torch, dtype)) for r in range(WORLD)]


def equal(got, want) -> bool:
    if isinstance(want, torch.Tensor):
        return got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(equal, got, want))
    return got == want


def test_moved_tensors_arrive_unchanged_in_every_dtype(runner):
    """test_link.py runs every row of the table in float32."""
    for rank, results in enumerate(runner.run(cases, MOVES, MOVED, world=WORLD)):
        for name, dtype in itertools.product(MOVES, MOVED):
            got, want = results[f"{name}, {dtype}"], wire_value(CASES[name][1](inputs(dtype), rank))
            assert equal(got, want), f"{name}, {dtype}, rank {rank}: {got}, expected {want}"


@pytest.mark.parametrize("how", REDUCED)
def test_every_operation_reduces_every_dtype(runner, how):
    dtypes, oracle = REDUCED[how]
    for rank, results in enumerate(runner.run(reduced, how, [*dtypes], world=WORLD)):
        for dtype, got in results.items():
            exact = {"bool": torch.bool, "complex64": torch.complex128}.get(dtype, torch.float64)
            exact = torch.int64 if dtype in INTS else exact
            full = oracle(torch.stack(inputs(dtype)).to(exact)).to(getattr(torch, dtype))
            last = full if rank == WORLD - 1 else inputs(dtype)[rank]
            want = wire_value([full, last, full.chunk(WORLD)[rank]])
            assert equal(got, want), f"{dtype}, rank {rank}: {got}, expected {want}"


def test_unsupported_reduction_fails_and_next_probe_runs(runner):
    assert all("all_reduce of float32 is not possible" in error for error in runner.run(impossible, world=WORLD))
    assert runner.run(reduced, "SUM", ["float32"], world=WORLD), "the next probe has its own answer"
