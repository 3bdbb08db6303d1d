"""The kernel that computes dq, and D = rowsum(do ∘ o).

What must be true: dq and delta are those of attention in float64, from o and lse that are handed in; one kernel, the
scores computed again, tile by tile. How it would be faked: torch does the work (its operators are noted, what
torch.empty gives is NaN until a kernel writes it); the causal flag is forgotten in backward; a softmax with a maximum
and sum of its own instead of lse (an lse that is shifted must shift dq); delta left out (do and o are independent).
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.judge import callers, close
from lab.harness.pytest_plugin import exercise

from . import probes_kernels as probes
from . import probes_layouts as layouts
from .oracles import ALLOWED, PRECISIONS, WHERE, described, draw, expected, given_to_backward, needs_triton, room, tiles

DQ = "flash_attention.triton_backward_dq"
CAUSAL = "flash_attention.causal"
LENGTHS = "does the last tile stop where queries and keys do, and are all strides used?"
STRIDES = "are all strides used, and each for its own tensor, do and o too?"
OPERANDS = ["q", "k", "v", "do", "o"]  # of any strides
ABSENT = "p of a key that is not there is 0, not exp(0 − lse): mask p itself"
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
    got = run(probes.backward_dq, given, is_causal, lie, where, keep, triton=where, replace=[CAUSAL])
    what = described(q, k, is_causal, layouts.told(lie))
    assert got["dq"].dtype == q.dtype, f"dq is {got['dq'].dtype}, q is {q.dtype}"
    delta = (given["do"].double() * given["o"].double()).sum(-1)
    close(
        got["delta"], delta, (given["do"].float() * given["o"].float()).sum(-1), f"delta of {what}", factor=12,
        dims="batch, head, query", cause="rowsum(do ∘ o) of all queries, in float32, stored for the other kernel",
    )  # fmt: skip
    close(
        got["dq"], want["dq"], yardstick["dq"], f"dq of {what}", factor=8, dims="batch, head, query, dim", cause=cause,
    )  # fmt: skip
    callers(got["changed"], [], what)
    if keep:
        tiles(got)
    return got


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_lengths_that_fit_no_tile(run, rng, expect, dtype, where):
    for low, high in ((1, 15), (33, 60), (130, 170)):
        drawn = draw(rng, rng.integers(low, high), rng.integers(low, high), dtype=dtype, dim=rng.choice([16, 24, 40]))
        check(
            run,
            rng,
            expect,
            drawn,
            False,
            where,
            cause=LENGTHS,
        )


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_mask_holds_in_backward_too(run, rng, expect, dtype, where):
    n = rng.integers(66, 140)
    for queries, keys in ((n, n), (n, n + rng.integers(5, 90)), (n + rng.integers(5, 90), n)):
        drawn = draw(rng, queries, keys, dtype=dtype, dim=16)
        check(run, rng, expect, drawn, True, where, cause="query i sees keys 0 … i, in forward and in backward")


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("case", range(5))
def test_any_strides(run, rng, expect, case, where):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16, dtype="float16")
    given, lie = layouts.different(rng, **dict(zip(("q", "k", "v", "do"), drawn, strict=True)))
    lie["o"] = rng.choice(sorted({*layouts.DIFFERENT[:5]} - {*lie.values()}))  # no two alike
    check(run, rng, expect, given.values(), rng.choice([False, True]), where, lie, STRIDES)


@exercise(DQ, kind="numerics")
def test_offsets_beyond_what_an_int32_holds(run, rng, expect, where):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16)
    lie = dict.fromkeys(OPERANDS, layouts.FAR)
    check(run, rng, expect, drawn, False, "interpret", lie, layouts.FAR_CAUSE)


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("dim", [1, 64, 128, 256])
def test_every_width_of_a_head(run, rng, expect, dim, where):
    drawn = draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=dim)
    check(run, rng, expect, drawn, rng.choice([False, True]), where)


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(run, rng, expect, is_causal, where):
    group = rng.integers(2, 3)
    drawn = draw(rng, rng.integers(20, 60), rng.integers(20, 60), batch=2, heads=2, group=group, dim=16)
    check(run, rng, expect, drawn, is_causal, where, cause=f"query head h uses key head h // {group}")


@exercise(DQ, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences(run, rng, expect, is_causal, where):
    n = rng.integers(700, 900)
    drawn = draw(rng, n, n + rng.integers(1, 200), batch=1, heads=1, dim=16, dtype="float16")
    check(run, rng, expect, drawn, is_causal, where, cause="walk to the last key that is seen")


@exercise(DQ, kind="numerics")
def test_thousands_of_keys_are_summed_in_float32(run, rng, expect, where):
    """Keys nearly alike: dq is a sum of thousands of terms of one sign, and grows slowly."""
    q, k, v, do = draw(rng, 8, 3000, batch=1, heads=1, dim=16, dtype="float16", scale=1 / 64)
    given = given_to_backward(expect, q, k + 4, v, do, False)
    given["delta"], given["o"] = given["delta"] * 0, given["o"] * 0  # dS = P ∘ dP
    given["v"], given["do"] = (given["v"] + 2).abs(), given["do"].abs() + 1
    want, _ = expected(expect, given, False)
    got = run(probes.backward_dq, given, False, {}, where, triton=where, replace=[CAUSAL])["dq"]
    worst = ((got.double() - want["dq"]) / want["dq"]).abs().max().item()
    assert worst <= 0.8 * 2**-10, (
        f"dq of 3,000 keys is off by {worst:.2g} of its value; rounded to float16 once it is by {0.5 * 2**-10:.2g}: "
        "accumulate in float32"
    )


@exercise(DQ, kind="numerics")
def test_logits_fifty_times_larger(run, rng, expect, where):
    drawn = draw(rng, rng.integers(40, 100), rng.integers(40, 100), scale=50.0, dim=16)
    check(
        run, rng, expect, drawn, rng.choice([False, True]), where, cause="p = exp(s − lse) is at most 1; mask p itself"
    )


@exercise(DQ, kind="numerics")
def test_keys_that_are_not_there_add_nothing(run, rng, expect, where):
    """Scores far below 0: a key that is not there has score 0, and exp(0 − lse) overflows."""
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


@exercise(DQ, kind="numerics")
def test_probabilities_come_from_the_lse_that_is_given(run, rng, expect, where):
    drawn = draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=16)
    given = given_to_backward(expect, *drawn, False)
    given["lse"] = given["lse"] + rng.uniform(0.5, 1.5)  # every probability is smaller than it was
    given["o"] = torch.zeros_like(given["o"])
    given["delta"] = torch.zeros_like(given["delta"])
    want, yardstick = expected(expect, given, False)
    got = run(probes.backward_dq, given, False, {}, where, triton=where, replace=[CAUSAL])
    close(got["dq"], want["dq"], yardstick["dq"], "dq of a larger lse", factor=8, cause="P is exp(S − lse)")


@exercise(DQ, kind="numerics")
def test_no_program_depends_on_another(run, rng, expect, where):
    """The interpreter runs programs one after another; a GPU does not."""
    drawn = draw(rng, rng.integers(150, 200), rng.integers(150, 200), batch=1, group=2, dim=16, dtype="float16")
    given = given_to_backward(expect, *drawn, False)
    raced = run(probes.raced_addresses, given, rng.choice([False, True]), "dq", replace=[CAUSAL])
    assert raced == 0, f"{raced} addresses are stored by one program and touched by another: on a GPU that is chance"


@exercise(DQ, kind="property")
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_kernel_does_the_work_and_twice_the_same(run, rng, expect, is_causal, where):
    drawn = draw(rng, *(rng.integers(257, 300) for _ in range(2)), batch=1, heads=1, dim=24)
    got = check(run, rng, expect, drawn, is_causal, where, keep=True)
    other = sorted({*got["operators"]} - ALLOWED)
    assert not other, f"torch ran {', '.join(other)} inside the call: allocation, views and casts are its part"
    assert len(got["launches"]) == 1, f"{len(got['launches'])} launches, expected one: {got['launches']}"
    assert got["atomics"] == 0, f"{got['atomics']} atomic operations: their order, and so the last bit, is chance"
    assert got["same"], "two runs differ"


@exercise(DQ, kind="property")
def test_tiles_above_the_diagonal_are_never_read(run, rng, expect, where):
    drawn = draw(rng, n := rng.integers(257, 300), n, batch=1, heads=1, dim=16, dtype="float16")
    got = check(run, rng, expect, drawn, True, "interpret", keep=True)
    block, tile = tiles(got)
    for program in sorted({tuple(p) for p, *_ in got["stores"]}):
        mine = [rows for p, _, rows in got["stores"] if tuple(p) == program]
        read = sum(len(rows) for p, _, rows in got["loads"] if tuple(p) == program)
        ends = [min((rows[0] // block + 1) * block, n) if got["own"] else n for rows in mine]
        most = sum(-(-end // tile) * tile for end in ends)
        assert read <= most, (
            f"program {program}, rows {mine[0][0]} … of dq, reads {read} rows of k; {most} hold all it sees"
        )
