"""The kernel that computes dk and dv.

What must be true: dk and dv are those of attention in float64, from lse and delta that are handed in, summed over the
query heads of a group; one kernel, no atomics, the same bits every time. How it would be faked: torch does the work
(its operators are noted, what torch.empty gives is NaN until a kernel writes it); atomics over query tiles or heads
(they are counted, and two runs compared); queries before the diagonal are read and masked (loads are counted by
address).
"""

from __future__ import annotations

import pytest

from lab.harness.judge import callers, close
from lab.harness.pytest_plugin import exercise

from . import probes_kernels as probes
from . import probes_layouts as layouts
from .oracles import ALLOWED, PRECISIONS, WHERE, described, draw, expected, given_to_backward, needs_triton, room, tiles

DKDV = "flash_attention.triton_backward_dkdv"
STRIDES = "are all strides used, and each for its own tensor, do too?"
OPERANDS = ["q", "k", "v", "do"]  # of any strides
ABSENT = "p of a query that is not there is 0, not exp(0 − lse): mask p itself"
pytestmark = [needs_triton, pytest.mark.parametrize("where", WHERE)]


def check(run, rng, expect, drawn, is_causal, where, lie=None, cause="", keep=False):
    """What was seen of a run whose numbers are right. keep: loads and stores, too, of tiles that are tiles.

    lie: how operands lie in memory; otherwise it is drawn.
    """
    given = given_to_backward(expect, *drawn, is_causal)
    want, yardstick = expected(expect, given, is_causal)
    q, k = given["q"], given["k"]
    where = room(q, where)
    keep &= where == "interpret"
    if lie is None:
        lie = layouts.draw(rng, **{n: given[n] for n in OPERANDS})[1]
    got = run(probes.backward_dkdv, given, is_causal, lie, where, keep, triton=where)
    what = described(q, k, is_causal, layouts.told(lie))
    for name in ("dk", "dv"):
        assert got[name].dtype == k.dtype, f"{name} is {got[name].dtype}, k is {k.dtype}"
        close(
            got[name], want[name], yardstick[name], f"{name} of {what}", factor=8, dims="batch, head, key, dim",
            cause=cause,
        )  # fmt: skip
    callers(got["changed"], [], what)
    if keep:
        tiles(got)
    return got


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_lengths_that_fit_no_tile(run, rng, expect, dtype, where):
    for low, high in ((1, 15), (33, 60), (130, 170)):
        drawn = draw(rng, rng.integers(low, high), rng.integers(low, high), dtype=dtype, dim=rng.choice([16, 24, 40]))
        check(run, rng, expect, drawn, False, where, cause="queries that are not there have probability 0")


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_mask_holds_in_backward_too(run, rng, expect, dtype, where):
    n = rng.integers(66, 140)
    for queries, keys in ((n, n), (n, n + rng.integers(5, 90)), (n + rng.integers(5, 90), n)):
        drawn = draw(rng, queries, keys, dtype=dtype, dim=16)
        check(
            run,
            rng,
            expect,
            drawn,
            True,
            where,
            cause="query i sees keys 0 … i; a key that no query sees has gradient 0",
        )


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("case", range(5))
def test_any_strides(run, rng, expect, case, where):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16, dtype="float16")
    given, lie = layouts.different(rng, **dict(zip(("q", "k", "v", "do"), drawn, strict=True)))
    check(run, rng, expect, given.values(), rng.choice([False, True]), where, lie, STRIDES)


@exercise(DKDV, kind="numerics")
def test_offsets_beyond_what_an_int32_holds(run, rng, expect, where):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16)
    lie = dict.fromkeys(OPERANDS, layouts.FAR)
    check(run, rng, expect, drawn, False, "interpret", lie, layouts.FAR_CAUSE)


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("dim", [1, 64, 128, 256])
def test_every_width_of_a_head(run, rng, expect, dim, where):
    drawn = draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=dim)
    check(run, rng, expect, drawn, rng.choice([False, True]), where)


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_summed_over_the_heads_of_a_group(run, rng, expect, is_causal, where):
    group = rng.integers(2, 3)
    drawn = draw(rng, rng.integers(20, 60), rng.integers(20, 60), batch=2, heads=2, group=group, dim=16)
    check(
        run,
        rng,
        expect,
        drawn,
        is_causal,
        where,
        cause=f"key head h is used by query heads {group}·h … {group}·h + {group - 1}",
    )


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences(run, rng, expect, is_causal, where):
    n = rng.integers(700, 900)
    drawn = draw(rng, n + rng.integers(1, 200), n, batch=1, heads=1, dim=16, dtype="float16")
    check(run, rng, expect, drawn, is_causal, where, cause="walk to the last query")


@exercise(DKDV, kind="numerics")
def test_logits_fifty_times_larger(run, rng, expect, where):
    drawn = draw(rng, rng.integers(40, 100), rng.integers(40, 100), scale=50.0, dim=16)
    check(run, rng, expect, drawn, rng.choice([False, True]), where, cause="p = exp(s − lse) is at most 1")


@exercise(DKDV, kind="numerics")
def test_queries_that_are_not_there_add_nothing(run, rng, expect, where):
    """Scores far below 0: for a query that is not there, exp(0 − lse) of a forgotten mask overflows or counts."""
    for is_causal in (False, True):
        q, k, v, do = draw(rng, 2 * rng.integers(10, 30) + 1, 2 * rng.integers(10, 30) + 1, dim=16)
        drawn = (q.abs() * 400, -k.abs(), v, do)
        check(
            run,
            rng,
            expect,
            drawn,
            is_causal,
            where,
            cause=ABSENT,
        )


@exercise(DKDV, kind="numerics")
def test_thousands_of_queries_are_summed_in_float32(run, rng, expect, where):
    q, k, v, do = draw(rng, 2500, 8, batch=1, heads=1, dim=16, dtype="float16", scale=1 / 64)
    drawn = (q, k, v, do + 1)
    got = check(run, rng, expect, drawn, False, where, cause="keep dk and dv in float32 until the last tile")
    want = expected(expect, given_to_backward(expect, *drawn, False), False)[0]["dv"]
    worst = ((got["dv"].double() - want) / want).abs().max().item()
    assert worst <= 0.8 * 2**-10, (
        f"dv of 2,500 queries is off by {worst:.2g} of its value; rounded to float16 once it is by {0.5 * 2**-10:.2g}"
    )


@exercise(DKDV, kind="numerics")
def test_delta_and_lse_are_those_that_are_given(run, rng, expect, where):
    drawn = draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=16)
    given = given_to_backward(expect, *drawn, False)
    given["lse"] = given["lse"] + rng.uniform(0.5, 1.5)  # every probability is smaller than it was
    given["delta"] = rng.normal(*given["delta"].shape)
    want, yardstick = expected(expect, given, False)
    got = run(probes.backward_dkdv, given, False, {}, where, triton=where)
    for name in ("dk", "dv"):
        close(got[name], want[name], yardstick[name], f"{name} of another lse and delta", factor=8)


@exercise(DKDV, kind="numerics")
def test_no_program_depends_on_another(run, rng, expect, where):
    """The interpreter runs programs one after another; a GPU does not."""
    drawn = draw(rng, rng.integers(150, 200), rng.integers(150, 200), batch=1, group=2, dim=16, dtype="float16")
    given = given_to_backward(expect, *drawn, False)
    raced = run(probes.raced_addresses, given, rng.choice([False, True]), "dkdv")
    assert raced == 0, f"{raced} addresses are stored by one program and touched by another: on a GPU that is chance"


@exercise(DKDV, kind="property")
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_kernel_does_the_work_and_twice_the_same(run, rng, expect, is_causal, where):
    drawn = draw(rng, *(rng.integers(257, 300) for _ in range(2)), batch=1, heads=1, group=2, dim=24)
    got = check(run, rng, expect, drawn, is_causal, where, keep=True)
    other = sorted({*got["operators"]} - ALLOWED)
    assert not other, f"torch ran {', '.join(other)} inside the call: allocation, views and casts are its part"
    assert len(got["launches"]) == 1, f"{len(got['launches'])} launches, expected one: {got['launches']}"
    assert got["atomics"] == 0, f"{got['atomics']} atomic operations: their order, and so the last bit, is chance"
    assert got["same"], "two runs differ"


@exercise(DKDV, kind="property")
def test_queries_before_the_diagonal_are_never_read(run, rng, expect, where):
    n = rng.integers(260, 330)
    drawn = draw(rng, n, n, batch=1, heads=1, dim=16, dtype="float16")
    got = check(run, rng, expect, drawn, True, "interpret", keep=True)
    _, tile = tiles(got)
    for program in sorted({tuple(p) for p, *_ in got["stores"]}):
        mine = [rows for p, _, rows in got["stores"] if tuple(p) == program]
        read = sum(len(rows) for p, _, rows in got["loads"] if tuple(p) == program)
        most = sum(n - rows[0] // tile * tile for rows in mine)
        assert read <= most, (
            f"program {program}, keys {mine[0][0]} …, reads {read} rows of q; {most} hold all that see them"
        )
