"""Checks shared by all kernels: right numbers for any strides, one launch, tiles, and independent programs."""

from __future__ import annotations

import functools
import math

import torch

from lab.harness import layouts
from lab.harness.judge import close

from . import probes_kernels as probes
from .causes import wrong_output
from .oracles import ALLOWED, LARGEST, attention, described, given_to_backward, recomputed, room, tiles

CAUSAL = "flash_attention.causal"
FORWARD = ("forward", "overlapped")
NEEDS = {"forward": [CAUSAL], "overlapped": [CAUSAL], "dq": [CAUSAL], "dkdv": []}
OPERANDS = {"forward": "q k v", "overlapped": "q k v", "dq": "q k v do o", "dkdv": "q k v do"}  # of any strides
LSE = "the natural log of the sum of exp of the scaled scores"
DELTA = "rowsum(do ∘ o) of all queries, in float32, stored for the other kernel"
# Of each kernel the results as they are judged: whose dtype they have, times a plain computation's error, dimensions.
RESULTS = {
    **{kernel: [("o", "q", 6, "query, dim"), ("lse", "", 12, "query")] for kernel in FORWARD},
    "dq": [("delta", "", 12, "query"), ("dq", "q", 8, "query, dim")],
    "dkdv": [("dk", "k", 8, "key, dim"), ("dv", "k", 8, "key, dim")],
}


def check(kernel, run, rng, expect, drawn, is_causal, cause="", lie=None, keep=False, *, where: str) -> dict:
    """Run a kernel, assert right numbers, return the record of the run. keep: record loads and stores, and check tiles.

    drawn: q, k, v and do. lie: how operands lie in memory; otherwise it is drawn.
    """
    given = dict(zip(("q", "k", "v", "do"), drawn, strict=True))
    given = given if kernel in FORWARD else given_to_backward(expect, *drawn, is_causal)
    want, yardstick = expected(expect, kernel, given, is_causal)
    where = room(given["q"], where)
    keep &= where == "interpret"
    if lie is None:
        lie = layouts.draw(rng, **{n: given[n] for n in OPERANDS[kernel].split()})[1]
    return layouts.blaming(
        lie, functools.partial(_check, kernel, run, given, want, yardstick, is_causal, cause, keep, where)
    )


def _check(kernel, run, given, want, yardstick, is_causal, cause, keep, where, lie) -> dict:
    got = run(probes.launched, kernel, given, is_causal, lie, where, keep, triton=where, replace=NEEDS[kernel])
    what = described(given["q"], given["k"], is_causal, layouts.told(lie))
    causes = {
        "o": lambda: wrong_output(got["o"], want["o"], *(given[n] for n in "qkv"), is_causal) or cause,
        "lse": f"{LSE}{cause and '; '}{cause}", "delta": DELTA,
    }  # fmt: skip
    for name, like, factor, dims in RESULTS[kernel]:
        if like:
            assert got[name].dtype == given[like].dtype, f"{name} is {got[name].dtype}, {like} is {given[like].dtype}"
        assert like or got[name].dtype == torch.float32, f"{name} is {got[name].dtype}, expected float32"
        close(
            got[name], want[name], yardstick[name], f"{name} of {what}", factor, f"batch, head, {dims}",
            causes.get(name, cause),
        )  # fmt: skip
    results = " and ".join(n for n, *_ in RESULTS[kernel])
    assert got["contiguous"], f"{results} of {what}: expected both contiguous, whatever the strides of the inputs"
    if keep:
        tiles(got)
        least = sum(got[n].numel() for n, *_ in RESULTS[kernel])
        assert got["elsewhere"] <= 4 * least, (
            f"kernels store {got['elsewhere']:,} elements beside {results}, which have {least:,}; all scores are "
            f"{given['q'][..., 0].numel() * given['k'].shape[2]:,}: they stay on the chip"
        )
    return got


def expected(expect, kernel: str, given: dict, is_causal: bool) -> tuple[dict, dict]:
    """Results in float64, and in the inputs' dtype; the error of the latter sets the tolerance."""
    dtypes = ("float64", str(given["q"].dtype).removeprefix("torch."))
    if kernel in FORWARD:
        want, plain = (expect(attention, *(given[n] for n in "qkv"), is_causal, dtype) for dtype in dtypes)
    else:
        want, plain = (expect(recomputed, given, is_causal, dtype) for dtype in dtypes)
    return want, plain


def alone(got: dict) -> None:
    """Assert that one kernel did the work: torch's own operators only allocate, make views, and cast."""
    other = sorted({*got["operators"]} - ALLOWED)
    assert not other, f"torch ran {', '.join(other)} inside the call: allocation, views and casts are its part"
    assert len(got["launches"]) == 1, f"{len(got['launches'])} launches, expected one: {got['launches']}"
    grid = got["launches"][0][1]
    assert math.prod(grid) >= 2, f"a grid of {grid} for more than {LARGEST} rows: one program per tile of rows"


def twice_the_same(got: dict) -> None:
    assert got["atomics"] == 0, f"{got['atomics']} atomic operations: their order, and so the last bit, is chance"
    assert got["same"], "two runs differ"


def independent(kernel: str, run, rng, given: dict) -> None:
    """Assert that no program depends on another: the interpreter runs them one after another, and a GPU does not."""
    raced = run(probes.raced_addresses, kernel, given, rng.choice([False, True]), replace=NEEDS[kernel])
    assert raced == 0, f"{raced} addresses are stored by one program and touched by another: on a GPU that is chance"


def rows_by_program(got: dict) -> list[tuple[tuple, list, list]]:
    """(program, rows per store, rows per load) of each program that stores."""
    programs = sorted({tuple(p) for p, *_ in got["stores"]})
    return [
        (program, *([rows for p, _, rows in got[what] if tuple(p) == program] for what in ("stores", "loads")))
        for program in programs
    ]
