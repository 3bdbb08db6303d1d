"""FlashAttention-2's backward pass, by tiles.

Must hold: dq, dk and dv are those of attention for any lengths, masks, strides and dtypes, from the inputs, o and lse
alone; neither the matrix of queries × keys nor whole rows or columns of it ever exist. Typical fakes: compute them, in
torch or not (caught by the process's memory peak in runs whose numbers are judged); return anything for long sequences
(caught by numeric tests of the same lengths); leave it to autograd (forbidden); handle only multiples of the tile;
forget the mask in one of the three gradients; keep sums in 16 bits.
"""

import functools
import math

import pytest

from lab.harness import layouts
from lab.harness.calls import metered
from lab.harness.judge import close, never_holds
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import Trace

from . import probes_steps as probes
from .oracles import DTYPES, attention, backward_inputs, draw, lengths, recomputed, rounding
from .test_tiled_forward import LEADING, LONG, LONG_FACTOR, causal, check_small_tiles, draw_long

BACKWARD = "flash_attention.tiled_backward"
CALL = "impl.flash_attention.tiled_backward.tiled_backward"


def arguments(given: dict, is_causal: bool) -> list:
    return [*(given[name] for name in ("q", "k", "v", "o", "lse", "do")), is_causal]


def check(run, rng, expect, q, k, v, do, is_causal, layout=None, factor=3.0) -> Trace:
    """Check the gradients; return the trace. layout: memory layout of each argument; None: drawn."""
    given = backward_inputs(expect, q, k, v, do, is_causal)
    layout = layouts.draw(rng, **{n: given[n] for n in ("q", "k", "v", "o", "do")})[1] if layout is None else layout
    return layouts.blame(layout, functools.partial(_check, run, expect, given, is_causal, factor))


def _check(run, expect, given, is_causal, factor, layout) -> Trace:
    q, k = given["q"], given["k"]
    (trace,) = run.trace(probes.attention_gradients, given, is_causal, layout)
    got = trace.values
    exact = expect(attention, q, k, given["v"], is_causal, "float64")  # the given o and lse are rounded
    exact = {**given, **exact, "delta": (given["do"].double() * exact["o"]).sum(-1)}
    want, plain = (
        expect(recomputed, exact, is_causal, "float64"),
        expect(recomputed, given, is_causal, str(q.dtype)[6:]),
    )
    what = (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, is_causal={is_causal}, in memory: {layouts.listed(layout)}"
    )
    for name, rows in (("dq", "query"), ("dk", "key"), ("dv", "key")):
        assert got[name].dtype == q.dtype, f"{name} is {got[name].dtype}, the inputs are {q.dtype}"
        close(got[name], want[name], plain[name], f"{name} of {what}", factor, dims=f"batch, head, {rows}, dim")
    return trace


@exercise(BACKWARD, kind="numerics")
@causal
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_attention(run, rng, expect, dtype, is_causal):
    n = rng.integers(2, 3) * 128
    check(run, rng, expect, *draw(rng, n, n, dtype=dtype), is_causal)


@exercise(BACKWARD, kind="numerics")
@causal
def test_lengths_need_not_be_multiples_of_a_tile(run, rng, expect, is_causal):
    for sizes in lengths(rng):
        check(run, rng, expect, *draw(rng, *sizes), is_causal)
    given = backward_inputs(expect, *draw(rng, 600, 600, batch=1, heads=1, dim=16), is_causal)
    check_small_tiles(run, CALL, arguments(given, is_causal))


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dims", LEADING)
def test_any_leading_dimensions(run, rng, expect, dims):
    drawn = draw(rng, 70, 70, batch=math.prod(LEADING[dims]), heads=1)
    check(run, rng, expect, *(x.view(*LEADING[dims], *x.shape[-2:]) for x in drawn), True)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("case", range(4))
def test_strides_do_not_matter(run, rng, expect, case):
    q, k, v, do = draw(rng, 90, 75, batch=2, heads=2)
    given, layout = layouts.different(rng, q=q, k=k, v=v, do=do)
    check(run, rng, expect, *given.values(), True, {**layout, "o": rng.choice(layouts.ALIGNED)})


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_fifty_times_larger(run, rng, expect, dtype):
    check(run, rng, expect, *draw(rng, 150, 150, dtype=dtype, scale=50.0), True)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_accumulated_in_float32(run, rng, expect, dtype):
    """In 16 bits, long sums drift: over keys for dq, over queries for dk and dv."""
    for names, queries, keys in ((("dq",), 16, 2000), (("dk", "dv"), 2000, 16)):
        q, k, v, do = draw(rng, queries, keys, batch=1, heads=1, dim=16, dtype=dtype)
        given = backward_inputs(expect, q, k, v, do * 16, False)
        got, want = run(probes.attention_gradients, given, False, {}), expect(recomputed, given, False, "float64")
        for name in names:
            error, unavoidable = rounding(got[name], want[name], q.dtype)
            assert error <= 2 * unavoidable, (
                f"mean error of {name} with {queries:,} queries and {keys:,} keys is {error / unavoidable:.1f} times "
                f"that of rounding once to {dtype}: are the products and sums kept in float32 until the end?"
            )


@exercise(BACKWARD, kind="numerics")
def test_long_sequences(run, rng, expect):
    check(run, rng, expect, *draw_long(rng, rng.choice(["many keys", "many queries"])), {}, factor=LONG_FACTOR)


@exercise(BACKWARD, kind="property")
@pytest.mark.parametrize("shape", LONG)
def test_full_score_matrix_is_never_held(run, rng, expect, shape):
    """No score matrix is held, neither a square one, nor few queries × many keys, nor many queries × few keys."""
    *tensors, is_causal = draw_long(rng, shape)
    trace = check(run, rng, expect, *tensors, is_causal, {}, factor=LONG_FACTOR)
    given = backward_inputs(expect, *tensors, is_causal)
    q, k, v, _ = tensors
    tiny = {name: x[:, :, :64] for name, x in given.items()}
    (small,) = run.trace(probes.attention_gradients, tiny, is_causal, {})
    what, itemsize = LONG[shape]
    never_holds(
        trace, small, what, itemsize * q.shape[-2] * k.shape[-2], needs=3 * (4 * q.nbytes + 2 * (k.nbytes + v.nbytes)),
        seen=lambda: run(metered, CALL, arguments(given, is_causal)),
    )  # fmt: skip
