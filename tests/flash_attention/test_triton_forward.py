"""The fused kernel.

What must be true: o and lse are those of attention in float64 for any lengths, heads, widths, strides and dtypes; one
kernel computes them, which never writes scores and, with a causal mask, never reads a tile above the diagonal. How it
would be faked: torch does the work (inside the call its operators are noted, and only allocation, views and casts are
allowed), a kernel is launched for show (what torch.empty gives is NaN until a kernel writes it); only multiples of a
tile, equal lengths or dense strides work (they are drawn otherwise); whole rows are one tile (loads and stores of runs
whose output is judged are counted by address); low-precision sums (thousands of keys); the
softmax without a maximum (logits × 50); every tile is read and masked.
"""

from __future__ import annotations

import math

import pytest
import torch

from lab.harness.judge import callers, close, measured
from lab.harness.pytest_plugin import exercise

from . import probes_kernels as probes
from . import probes_layouts as layouts
from .causes import wrong_output
from .oracles import ALLOWED, LARGEST, PRECISIONS, WHERE, attention, described, draw, needs_triton, room, tiles

FORWARD = "flash_attention.triton_forward"
CAUSAL = "flash_attention.causal"
LENGTHS = "does the last tile stop where queries and keys do, and are all strides used?"
STRIDES = "are all four strides used, and each for its own tensor?"
HEADS = "there are 3 heads: is a program's head right where their number is no power of two?"
LSE = "the natural log of the sum of exp of the scaled scores"
pytestmark = [needs_triton, pytest.mark.parametrize("where", WHERE)]


def check(run, rng, expect, q, k, v, is_causal, where, lie=None, cause="", keep=False):
    """What was seen of a run whose numbers are right. keep: loads and stores, too, of tiles that are tiles.

    lie: how operands lie in memory; otherwise it is drawn.
    """
    where = room(q, where)
    keep &= where == "interpret"
    given = {"q": q, "k": k, "v": v}
    lie = layouts.draw(rng, **given)[1] if lie is None else lie
    got = run(probes.forward, given, is_causal, lie, where, keep, triton=where, replace=[CAUSAL])
    want = expect(attention, q, k, v, is_causal, "float64")
    yardstick = expect(attention, q, k, v, is_causal, str(q.dtype).removeprefix("torch."))
    what = described(q, k, is_causal, layouts.told(lie))
    assert got["o"].dtype == q.dtype, f"o is {got['o'].dtype}, q is {q.dtype}"
    close(
        got["o"], want["o"], yardstick["o"], f"o of {what}", factor=6,
        dims="batch, head, query, dim",
        cause=lambda: wrong_output(got["o"], want["o"], q, k, v, is_causal) or cause,
    )  # fmt: skip
    assert got["lse"].dtype == torch.float32, f"lse is {got['lse'].dtype}, expected float32"
    close(
        got["lse"], want["lse"], yardstick["lse"].float(), f"lse of {what}", factor=12,
        dims="batch, head, query", cause=f"{LSE}{cause and '; '}{cause}",
    )  # fmt: skip
    callers(got["changed"], [], what)
    if keep:
        tiles(got)
    return got


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_lengths_that_fit_no_tile(run, rng, expect, dtype, where):
    for low, high in ((1, 15), (17, 60), (65, 127), (129, 200)):
        q, k, v, _ = draw(rng, rng.integers(low, high), rng.integers(low, high), dtype=dtype)
        check(
            run,
            rng,
            expect,
            q,
            k,
            v,
            False,
            where,
            cause=LENGTHS,
        )


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_causal_attention(run, rng, expect, dtype, where):
    n = rng.integers(130, 190)
    for queries, keys in ((n, n), (n, n + rng.integers(5, 90)), (n + rng.integers(5, 90), n), (7, 150), (150, 7)):
        q, k, v, _ = draw(rng, queries, keys, dtype=dtype, dim=32)
        check(run, rng, expect, q, k, v, True, where, cause="query i sees keys 0 … i, aligned top left")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences(run, rng, expect, is_causal, where):
    n = rng.integers(900, 1100)
    q, k, v, _ = draw(rng, n, n + rng.integers(1, 200), batch=1, heads=1, dim=16, dtype="float16")
    check(run, rng, expect, q, k, v, is_causal, where, cause="walk to the last key that is seen")


@exercise(FORWARD, kind="numerics")
def test_one_query_one_key(run, rng, expect, where):
    for dtype in ("float32", "float16"):
        q, k, v, _ = draw(rng, 1, 1, batch=1, heads=1, dim=rng.choice([20, 33]), dtype=dtype)
        check(run, rng, expect, q, k, v, rng.choice([False, True]), where, cause="a dimension of one has any stride")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dim", [1, 16, 24, 40, 64, 80, 128, 256])
def test_every_width_of_a_head(run, rng, expect, dim, where):
    q, k, v, _ = draw(
        rng, rng.integers(20, 90), rng.integers(20, 90), dim=dim, dtype=rng.choice(["float32", "float16"])
    )
    check(
        run, rng, expect, q, k, v, rng.choice([False, True]), where, cause="tiles are padded, the scale is that of dim"
    )


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_several_tiles_of_a_wide_head(run, rng, expect, is_causal, where):
    queries, keys = rng.integers(260, 300), rng.integers(260, 300)
    q, k, v, _ = draw(rng, queries, keys, batch=1, heads=1, dim=128, dtype="float16")
    check(run, rng, expect, q, k, v, is_causal, where, cause="is every tile of v multiplied by the p of its own keys?")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("case", range(4))
def test_any_strides(run, rng, expect, dtype, case, where):
    q, k, v, _ = draw(rng, rng.integers(40, 90), rng.integers(40, 90), batch=2, heads=2, dtype=dtype)
    given, lie = layouts.different(rng, q=q, k=k, v=v)
    check(run, rng, expect, *given.values(), rng.choice([False, True]), where, lie, STRIDES)


@exercise(FORWARD, kind="numerics")
def test_offsets_beyond_what_an_int32_holds(run, rng, expect, where):
    q, k, v, _ = draw(rng, rng.integers(40, 90), rng.integers(40, 90), batch=2, heads=2, dim=16)
    _, lie = layouts.far(rng, q=q, k=k, v=v)
    check(run, rng, expect, q, k, v, False, "interpret", lie, layouts.FAR_CAUSE)


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("batch", [1, 3])
def test_each_batch_entry_and_head_has_its_own(run, rng, expect, batch, where):
    q, k, v, _ = draw(rng, rng.integers(20, 70), rng.integers(20, 70), batch=batch, heads=3, dim=16)
    check(run, rng, expect, q, k, v, False, where, cause=HEADS)


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(run, rng, expect, is_causal, where):
    group, heads = rng.integers(2, 4), rng.integers(2, 3)
    q, k, v, _ = draw(rng, rng.integers(20, 80), rng.integers(20, 80), batch=2, heads=heads, group=group, dim=16)
    check(run, rng, expect, q, k, v, is_causal, where, cause=f"query head h uses key head h // {group}")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_logits_fifty_times_larger(run, rng, expect, dtype, where):
    q, k, v, _ = draw(rng, rng.integers(60, 140), rng.integers(60, 140), dtype=dtype, scale=50.0, dim=16)
    check(run, rng, expect, q, k, v, rng.choice([False, True]), where, cause="subtract the running maximum")


@exercise(FORWARD, kind="numerics")
def test_thousands_of_keys_are_summed_in_float32(run, rng, expect, where):
    q, k, v, _ = draw(rng, 8, 3000, batch=1, heads=1, dim=16, dtype="float16", scale=1 / 64)
    got = check(run, rng, expect, q, k, v + 1, False, where, cause="keep m, l and acc in float32")
    want = expect(attention, q, k, v + 1, False, "float64")["lse"]
    error = (got["lse"].double() - want).abs().max().item()
    assert error <= 1e-4, f"lse is off by {error:.1e} after 3,000 keys: keep the sum in float32"


@exercise(FORWARD, kind="numerics")
def test_wrong_shapes_and_dtypes_are_refused(run, rng, where):
    good, f32 = [1, 2, 8, 16], ["float32"] * 3
    for shapes, dtypes in (
        ([good, [1, 2, 8, 32], [1, 2, 8, 32]], f32), ([good, good, [1, 2, 9, 16]], f32),
        ([good, [1, 3, 8, 16], [1, 3, 8, 16]], f32), ([good, [2, 2, 8, 16], [2, 2, 8, 16]], f32),
        ([[1, 1, 8, 264]] * 3, f32), ([good] * 3, ["float32", "float16", "float16"]), ([good] * 3, ["float64"] * 3),
    ):  # fmt: skip
        raised = run(probes.refused, shapes, dtypes)
        assert raised == "ValueError", f"{raised} was raised for {shapes} of {dtypes}, expected ValueError"


@exercise(FORWARD, kind="numerics")
def test_no_program_depends_on_another(run, rng, where):
    """The interpreter runs programs one after another; a GPU does not."""
    drawn = draw(rng, rng.integers(150, 200), rng.integers(150, 200), batch=1, group=2, dim=16, dtype="float16")
    given = dict(zip(("q", "k", "v"), drawn, strict=False))
    raced = run(probes.raced_addresses, given, rng.choice([False, True]), "forward", replace=[CAUSAL])
    assert raced == 0, f"{raced} addresses are stored by one program and touched by another: on a GPU that is chance"


@exercise(FORWARD, kind="property")
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_kernel_does_the_work(run, rng, expect, is_causal, where):
    q, k, v, _ = draw(rng, *(rng.integers(257, 300) for _ in range(2)), batch=1, heads=1, group=2, dim=24)
    got = check(run, rng, expect, q, k, v, is_causal, where, keep=True)
    other = sorted({*got["operators"]} - ALLOWED)
    assert not other, f"torch ran {', '.join(other)} inside the call: allocation, views and casts are its part"
    measured("kernels launched", len(got["launches"]), 1)
    assert len(got["launches"]) == 1, f"{len(got['launches'])} launches, expected one: {got['launches']}"
    assert got["contiguous"], "o and lse are contiguous"


@exercise(FORWARD, kind="property")
def test_programs_share_the_queries(run, rng, expect, where):
    """A grid of one program would walk over all queries by itself: nothing runs beside it."""
    q, k, v, _ = draw(rng, 512, 512, batch=1, heads=2, dim=16)
    (launch,) = check(run, rng, expect, q, k, v, False, where, keep=True)["launches"]
    programs = math.prod(launch[1])
    assert programs >= 2 * 512 // 128, f"a grid of {launch[1]} for 2 heads of 512 queries: a program a tile of queries"


@exercise(FORWARD, kind="property")
@pytest.mark.parametrize("kind", ["square", "more keys", "more queries"])
def test_tiles_above_the_diagonal_are_never_read(run, rng, expect, kind, where):
    """By address, in the interpreter: a store of o covers at most BLOCK_M rows, a load of k at most BLOCK_N."""
    more = {"square": (0, 0), "more keys": (0, 130), "more queries": (130, 0)}[kind]
    n, heads = rng.integers(257, 300), rng.integers(1, 2)
    q, k, v, _ = draw(rng, n + more[0], n + more[1], batch=1, heads=heads, dim=16, dtype="float16")
    got = check(run, rng, expect, q, k, v, True, "interpret", keep=True)
    queries, keys = q.shape[2], k.shape[2]
    block_m, block_n = tiles(got)
    for program in sorted({tuple(p) for p, *_ in got["stores"]}):
        stores = [rows[0] // block_m for p, _, rows in got["stores"] if tuple(p) == program]
        loads = [rows[-1] for p, _, rows in got["loads"] if tuple(p) == program]
        seen = [min((i + 1) * block_m, queries, keys) if got["own"] else keys for i in stores]
        most = sum(-(-end // block_n) for end in seen)
        assert len(loads) <= most, (
            f"program {program} stores tile {stores} of {block_m} rows of o and loads {len(loads)} tiles of k, up to "
            f"key {max(loads)}; {most} tiles of {block_n} keys hold all that its rows see"
        )
    if got["own"]:  # what the kernel may not read, it cannot: a stand-in for key_range reads all
        seen = n + LARGEST
        q, k, v, _ = draw(rng, n, seen + 300, batch=1, heads=1, dim=16, dtype="float16")
        check(run, rng, expect, q, k, v, True, "interpret", dict.fromkeys("kv", f"{layouts.WALLED}{seen}"))


@exercise(FORWARD, kind="property")
def test_scores_are_never_stored(run, rng, expect, where):
    q, k, v, _ = draw(rng, 64, 2048 + rng.integers(0, 99), batch=1, heads=1, dim=16, dtype="float16")
    got = check(run, rng, expect, q, k, v, False, "interpret", keep=True)
    least = q.numel() + q.shape[2]
    assert got["elsewhere"] <= 4 * least, (
        f"kernels store {got['elsewhere']:,} elements beside o and lse, which have {least:,}; all scores are "
        f"{q.shape[2] * k.shape[2]:,}: they stay on the chip"
    )
