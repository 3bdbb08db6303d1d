"""The kernel that computes dk and dv.

Must hold: dk and dv are those of attention in float64, from the lse and delta that are passed in, summed over the query
heads of a group; one kernel, no atomics, equal bits in every run. Typical fakes: torch does the work (caught by
recording its operators, and because torch.empty is NaN until a kernel writes); atomics over query tiles or heads
(caught by counting them, and by comparing two runs); queries before the diagonal are read and masked (caught by
counting loads).
"""

import functools

import pytest
import torch

from lab.harness import layouts
from lab.harness.pytest_plugin import exercise

from . import judged
from .oracles import MODES, PRECISIONS, draw, lengths, needs_triton, rounding, tiles

DKDV = "flash_attention.triton_backward_dkdv"
LENGTHS = "queries that are not there have p = 0; with a mask query i sees keys 0 … i, and no others have a gradient"
STRIDES = "are all strides used, and each for its own tensor, do too?"
pytestmark = [needs_triton, pytest.mark.parametrize("where", MODES)]


@pytest.fixture
def check(run, rng, expect, where):
    return functools.partial(judged.check, "dkdv", run, rng, expect, where=where)


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_fit_no_tile(check, rng, dtype, is_causal):
    for sizes in lengths(rng):
        check(draw(rng, *sizes, dtype=dtype, dim=rng.choice([16, 24, 40])), is_causal, LENGTHS)


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("case", range(5))
def test_any_strides(check, rng, case):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16, dtype="float16")
    given, layout = layouts.different(rng, **dict(zip(("q", "k", "v", "do"), drawn, strict=True)))
    check(given.values(), rng.choice([False, True]), STRIDES, layout)


@exercise(DKDV, kind="numerics")
def test_offsets_beyond_what_an_int32_holds(check, rng):
    drawn = draw(rng, rng.integers(40, 80), rng.integers(40, 80), batch=2, heads=2, dim=16)
    check(drawn, False, layouts.FAR_CAUSE, dict.fromkeys(("q", "k", "v", "do"), layouts.FAR), where="interpret")


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("dim", [1, 64, 128, 256])
def test_every_width_of_a_head(check, rng, dim):
    check(draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=dim), rng.choice([False, True]))


@exercise(DKDV, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_summed_over_the_heads_of_a_group(check, rng, is_causal):
    group = rng.integers(2, 3)
    drawn = draw(rng, rng.integers(20, 60), rng.integers(20, 60), batch=2, heads=2, group=group, dim=16)
    check(drawn, is_causal, f"key head h is used by query heads {group}·h … {group}·h + {group - 1}")


@exercise(DKDV, kind="numerics")
def test_logits_fifty_times_larger(check, rng):
    drawn = draw(rng, rng.integers(40, 100), rng.integers(40, 100), scale=50.0, dim=16)
    check(drawn, rng.choice([False, True]), "p = exp(s − lse) is at most 1")


@exercise(DKDV, kind="numerics")
def test_queries_that_are_not_there_add_nothing(check, rng):
    """lse is far below 0: without the mask, p of a padded query is exp(0 − lse), which overflows or adds to the sum."""
    for is_causal in (False, True):
        q, k, v, do = draw(rng, 2 * rng.integers(10, 30) + 1, 2 * rng.integers(10, 30) + 1, dim=16)
        drawn = (q.abs() * 400, -k.abs(), v, do)
        check(drawn, is_causal, "p of a query that is not there is 0, not exp(0 − lse): mask p itself")


@exercise(DKDV, kind="numerics")
def test_thousands_of_queries_are_summed_in_float32(check, rng):
    q, k, v, do = draw(rng, 2500, 8, batch=1, heads=1, dim=16, dtype="float16", scale=1 / 64)
    cause = "keep dk and dv in float32 until the last tile"
    got = check((q, k, v, do + 1), False, cause)
    judged.check_rounded_once(got["dv"], got["want"]["dv"], "dv of 2,500 queries", cause)
    error, unit = rounding(got["dk"], got["want"]["dk"], torch.float16)
    assert error <= 3 * unit, f"mean error of dk is {error / unit:.1f} times that of rounding once to float16: {cause}"


@exercise(DKDV, kind="numerics")
def test_delta_and_lse_are_those_that_are_given(check, rng):
    """lse is larger than in forward, so every probability is smaller; delta is random."""

    def shifted(given: dict) -> dict:
        shift, delta = rng.uniform(0.5, 1.5), rng.normal(*given["delta"].shape)
        return given | {"lse": given["lse"] + shift, "delta": delta}

    check(draw(rng, rng.integers(20, 70), rng.integers(20, 70), dim=16), False, "use them", {}, change=shifted)


@exercise(DKDV, kind="property")
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_kernel_does_the_work_and_twice_the_same(run, check, rng, is_causal, where):
    drawn = draw(rng, rng.integers(257, 300), rng.integers(257, 300), batch=1, heads=1, group=2, dim=24)
    layout = dict.fromkeys("qkv", "columns first")
    got = check(drawn, is_causal, layout=layout, keep=True)
    judged.check_single_launch(got)
    if where == "interpret" and is_causal:
        judged.check_compiles("dkdv", run, got, drawn, is_causal, layout)
    judged.check_deterministic(got)


@exercise(DKDV, kind="property")
def test_queries_before_the_diagonal_are_never_read(check, rng):
    drawn = draw(rng, n := rng.integers(260, 330), n, batch=1, heads=1, dim=16, dtype="float16")
    got = check(drawn, True, keep=True, where="interpret")
    _, tile = tiles(got)
    judged.check_reads_no_more(got, lambda rows: n - rows[0] // tile * tile, "rows of q")
