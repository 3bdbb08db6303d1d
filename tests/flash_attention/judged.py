"""Checks shared by all kernels: right numbers for any strides, one launch, tiles, and independent programs."""

import functools
import math

import torch

from lab.harness import layouts
from lab.harness.judge import close

from . import probes_kernels as probes
from .causes import wrong_output
from .oracles import ALLOWED, MAX_ROWS, attention, backward_inputs, recomputed, tiles

FORWARD = ("forward", "overlapped")
OPERANDS = {"forward": "q k v", "overlapped": "q k v", "dq": "q k v do o", "dkdv": "q k v do"}  # of drawn strides
LSE = "the natural log of the sum of exp of the scaled scores"
DELTA = "rowsum(do ∘ o) of all queries, in float32, stored for the other kernel"
# Results: (name, operand of the same dtype or "" for float32, allowed multiple of the plain error, dimensions).
RESULTS = {
    **{kernel: [("o", "q", 6, "query, dim"), ("lse", "", 12, "query")] for kernel in FORWARD},
    "dq": [("delta", "", 12, "query"), ("dq", "q", 8, "query, dim")],
    "dkdv": [("dk", "k", 8, "key, dim"), ("dv", "k", 8, "key, dim")],
}


def check(
    kernel, run, rng, expect, drawn, is_causal, cause="", layout=None, keep=False, change=dict, *, where: str
) -> dict:
    """Run a kernel, assert that its numbers are right, return its record. keep: also record accesses, and check tiles.

    drawn: (q, k, v, do). layout: memory layout per operand; None: drawn. change: edits the inputs of a backward kernel.
    """
    given = dict(zip(("q", "k", "v", "do"), drawn, strict=True))
    given = given if kernel in FORWARD else change(backward_inputs(expect, *drawn, is_causal))
    oracle = (attention, *(given[n] for n in "qkv")) if kernel in FORWARD else (recomputed, given)
    want, yardstick = (expect(*oracle, is_causal, dtype) for dtype in ("float64", str(given["q"].dtype)[6:]))
    where = "native" if given["q"].dtype is torch.bfloat16 else where
    keep &= where == "interpret"
    if layout is None:
        layout = layouts.draw(rng, **{n: given[n] for n in OPERANDS[kernel].split()})[1]
    return layouts.blame(
        layout, functools.partial(_check, kernel, run, given, want, yardstick, is_causal, cause, keep, where)
    )


def _check(kernel, run, given, want, yardstick, is_causal, cause, keep, where, layout) -> dict:
    got = run(probes.launched, kernel, given, is_causal, layout, where, keep, triton=where)
    q, k = (tuple(given[n].shape) for n in "qk")
    what = f"{q} queries, {k} keys{', causal' * is_causal}{layout and ', '}{layouts.listed(layout)}"
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
        size = sum(got[n].numel() for n, *_ in RESULTS[kernel])
        assert got["elsewhere"] <= 4 * size, (
            f"kernels store {got['elsewhere']:,} elements beside {results}, which have {size:,}; all scores are "
            f"{given['q'][..., 0].numel() * given['k'].shape[2]:,}: they stay on the chip"
        )
    return got | {"want": want}


def check_compiles(kernel, run, interpreted: dict, drawn, is_causal, layout: dict) -> None:
    """Assert that the interpreted kernel compiles for a GPU, with the same source, flags and tiles."""
    given = dict(zip(("q", "k", "v", "do"), drawn, strict=True))
    given |= {"o": given["q"], "lse": given["q"][..., 0].contiguous(), "delta": given["q"][..., 0].contiguous()}
    sources = run(probes.compiles, kernel, given, is_causal, layout, triton="native")
    assert sources == interpreted["sources"], (
        "the interpreter ran another kernel than the one that compiles for a GPU, or with other flags and tiles: "
        f"(source, arguments) {interpreted['sources']}, compiled {sources}"
    )


def check_single_launch(got: dict) -> None:
    """Assert that one kernel did the work, in independent programs: torch's operators only allocate, view and cast."""
    other = sorted({*got["operators"]} - ALLOWED)
    assert not other, f"torch ran {', '.join(other)} inside the call: allocation, views and casts are its part"
    assert not got.get("changed"), f"{', '.join(got['changed'])}: not what the kernel stored, but written after it"
    assert len(got["launches"]) == 1, f"{len(got['launches'])} launches, expected one: {got['launches']}"
    # The interpreter runs programs one after another, and a GPU does not.
    assert not got.get("raced"), (
        f"{got['raced']} addresses are stored by one program and touched by another: on a GPU that is chance"
    )
    grid = got["launches"][0][1]
    assert math.prod(grid) >= 2, f"a grid of {grid} for more than {MAX_ROWS} rows: one program per tile of rows"


def check_deterministic(got: dict) -> None:
    assert got["atomics"] == 0, f"{got['atomics']} atomic operations: their order, and so the last bit, is chance"
    assert got["same"], "two runs differ"


def check_rounded_once(got, want, what: str, cause: str) -> None:
    """Assert that each value of a long sum in float16 is off by hardly more than one rounding."""
    worst = ((got.double() - want) / want).abs().max().item()
    assert worst <= 0.8 * 2**-10, (
        f"{what} is off by {worst:.2g} of its value; rounded to float16 once it is by {0.5 * 2**-10:.2g}: {cause}"
    )


def check_reads_no_more(got: dict, rows_needed, what: str) -> None:
    """Assert that no program reads more rows than rows_needed(rows that it stores)."""
    for program in sorted({tuple(p) for p, *_ in got["stores"]}):
        stores, loads = ([rows for p, _, rows in got[kind] if tuple(p) == program] for kind in ("stores", "loads"))
        read, limit = sum(map(len, loads)), sum(map(rows_needed, stores))
        assert read <= limit, (
            f"program {program}, from row {stores[0][0]} on, reads {read} {what}; {limit} hold all it needs"
        )


def check_no_tile_above_the_diagonal(got: dict, queries: int, keys: int) -> None:
    block_m, block_n = tiles(got)

    def rows_needed(rows: list[int]) -> int:
        end = min((rows[0] // block_m + 1) * block_m, queries, keys) if got["own"] else keys
        return -(-end // block_n) * block_n

    check_reads_no_more(got, rows_needed, "rows of k")
