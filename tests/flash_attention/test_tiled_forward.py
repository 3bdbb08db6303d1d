"""FlashAttention-2's forward pass, by tiles.

Must hold: o and lse are those of softmax(q kᵀ / √dim) v for any lengths, masks, strides and dtypes; neither the matrix
of queries × keys nor whole rows or columns of it ever exist. Typical fakes: compute them, in torch or not (caught by
the process's memory peak in runs whose numbers are judged); return anything for long sequences (caught by numeric tests
of the same lengths); call the library's attention (forbidden); handle only multiples of the tile (caught by drawn
lengths); no running maximum (caught by logits × 50).
"""

import functools
import math

import pytest
import torch

from lab.harness import layouts
from lab.harness.calls import metered
from lab.harness.judge import close, never_holds
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import Trace

from . import probes
from .causes import wrong_output
from .oracles import DTYPES, attention, draw, rounding

TILED = "flash_attention.tiled_forward"
APPLY = "impl.flash_attention.tiled_forward.TiledAttention.apply"
LONG = {  # (what must not exist, the least possible bytes per element)
    "full": ("a matrix of queries × keys", 2), "causal": ("a matrix, or mask, of queries × keys", 1),
    "many keys": ("a matrix of 16 queries × all keys", 4),
    "many queries": ("a matrix of all queries × a tile of keys", 4),
}  # fmt: skip
LONG_FACTOR = 10.0  # times the plain error: thousands are summed in another order
LEADING = {"none": [], "one": [3], "two": [2, 2], "three": [2, 1, 3]}
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def draw_long(rng, shape: str) -> list:
    """Draw q, k, v, do and is_causal. The matrix in LONG takes at least 32 MiB, a tile much less."""
    is_causal = shape == "causal"
    if shape == "many keys":
        queries, keys, dim = 16, 128 * rng.integers(4096, 4100), 2
    elif shape == "many queries":
        queries, keys, dim = 140_000 + rng.integers(0, 99), rng.integers(60, 90), 4
    else:
        queries = keys = 5_800 + rng.integers(0, 99) if is_causal else 128 * rng.integers(33, 34)
        dim = rng.choice([16, 32])
    return [*draw(rng, queries, keys, batch=1, heads=1, dim=dim), is_causal]


def lse_of(got, q):
    """The one saved tensor that has a number for each query."""
    found = [t for t in got["saved"] if isinstance(t, torch.Tensor) and t.shape == q.shape[:-1]]
    shapes = [t if isinstance(t, str) else tuple(t.shape) for t in got["saved"]]
    assert len(found) == 1, (
        f"expected one saved tensor of shape {tuple(q.shape[:-1])}, the log-sum-exp of each query; saved: {shapes}"
    )
    assert found[0].dtype == torch.float32, f"lse is {found[0].dtype}, expected float32"
    return found[0]


def check_small_tiles(run, function: str, arguments: list) -> None:
    """Assert that one call for 600 queries and keys of dim 16 makes nothing larger than a tile of scores."""
    seen = run(metered, function, arguments, 3)
    assert seen["largest_elements"] <= 128 * 128, (
        f"{seen['largest_op']} made {seen['largest_shape']} for 600 queries and keys, expected at most 128 × 128 scores"
    )


def check(run, rng, expect, q, k, v, _, is_causal, layout=None, factor=3.0) -> Trace:
    """Check o and lse; return the trace. layout: memory layout of q, k and v; None: drawn."""
    layout = layouts.draw(rng, q=q, k=k, v=v)[1] if layout is None else layout
    return layouts.blame(layout, functools.partial(_check, run, expect, q, k, v, is_causal, factor))


def _check(run, expect, q, k, v, is_causal, factor, layout) -> Trace:
    (trace,) = run.trace(probes.attend, q, k, v, is_causal, layout)
    got = trace.values
    want, plain = (expect(attention, q, k, v, is_causal, dtype) for dtype in ("float64", str(q.dtype)[6:]))
    what = (
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, is_causal={is_causal}, in memory: {layouts.listed(layout)}"
    )
    assert got["o"].dtype == q.dtype, f"o is {got['o'].dtype}, q is {q.dtype}: return o in q's dtype"
    for name, tensor, dims in (
        ("o", got["o"], "batch, head, query, dim"),
        ("lse", lse_of(got, q), "batch, head, query"),
    ):
        close(
            tensor, want[name], plain[name], f"{name} of {what}", factor, dims=dims,
            cause=lambda: wrong_output(got["o"], want["o"], q, k, v, is_causal),
        )  # fmt: skip
    return trace


@exercise(TILED, kind="numerics")
@causal
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_lse_are_those_of_attention(run, rng, expect, dtype, is_causal):
    n = rng.integers(2, 3) * 128
    check(run, rng, expect, *draw(rng, n, n, dtype=dtype), is_causal)


@exercise(TILED, kind="numerics")
@causal
def test_lengths_need_not_be_multiples_of_a_tile(run, rng, expect, is_causal):
    for n in (128 * rng.integers(1, 2) + rng.choice([1, 7, 33, 63, 65, 127]), rng.integers(1, 15)):
        check(run, rng, expect, *draw(rng, n, n), is_causal)
    check_small_tiles(run, APPLY, [*draw(rng, 600, 600, batch=1, heads=1, dim=16)[:3], is_causal])


@exercise(TILED, kind="numerics")
@causal
def test_queries_and_keys_may_differ_in_number(run, rng, expect, is_causal):
    few, many = rng.integers(3, 90), rng.integers(150, 280)
    for sizes in ((few, many), (many, few)):
        check(run, rng, expect, *draw(rng, *sizes), is_causal)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("dims", LEADING)
def test_any_leading_dimensions(run, rng, expect, dims):
    drawn = draw(rng, 70, 70, batch=math.prod(LEADING[dims]), heads=1)
    check(run, rng, expect, *(x.view(*LEADING[dims], *x.shape[-2:]) for x in drawn), True)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("case", range(4))
def test_strides_do_not_matter(run, rng, expect, case):
    q, k, v, do = draw(rng, 90, 75, batch=2, heads=2)
    given, layout = layouts.different(rng, q=q, k=k, v=v)
    check(run, rng, expect, *given.values(), do, True, layout)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_fifty_times_larger_do_not_overflow(run, rng, expect, dtype):
    check(run, rng, expect, *draw(rng, 150, 150, dtype=dtype, scale=50.0), True)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_accumulated_in_float32(run, rng, expect, dtype):
    """For a long row of keys, sums in 16 bits drift away from one rounding at the end."""
    q, k, v, _ = draw(rng, 16, 2000, batch=1, heads=1, dim=16, dtype=dtype)
    v = v.abs()  # so that sums grow
    got, want = run(probes.attend, q, k, v, False, {}), expect(attention, q, k, v, False, "float64")
    rounded, unavoidable = rounding(got["o"], want["o"], q.dtype)
    lse_error = (lse_of(got, q).double() - want["lse"]).abs().max().item()
    assert rounded <= 1.5 * unavoidable, (
        f"mean error of o is {rounded / unavoidable:.1f} times that of rounding once to {dtype}, lse is off by "
        f"{lse_error:.1e}: keep scores, sums and acc in float32"
    )
    assert lse_error <= 1e-4, f"o is right, after 2,000 keys lse is off by {lse_error:.1e}: keep sums in float32"


@exercise(TILED, kind="numerics")
def test_long_sequences(run, rng, expect):
    check(run, rng, expect, *draw_long(rng, rng.choice(["many keys", "many queries"])), {}, factor=LONG_FACTOR)


@exercise(TILED, kind="numerics")
def test_what_backward_needs_is_saved(run, rng):
    q, k, v, _ = draw(rng, 60, 50)
    got = run(probes.attend, q, k, v, False, {})
    others = [t for t in got["saved"] if isinstance(t, torch.Tensor)]
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", got["o"])):
        assert name in got["saved"] or any(torch.equal(t, tensor) for t in others), (
            f"{name} is not among the saved tensors (others have shapes {[tuple(t.shape) for t in others]}): "
            "ctx.save_for_backward(q, k, v, o, lse)"
        )
    lse_of(got, q)


@exercise(TILED, kind="property")
@pytest.mark.parametrize("shape", LONG)
def test_full_score_matrix_is_never_held(run, rng, expect, shape):
    """No score matrix is held, neither a square one, nor few queries × many keys, nor many queries × few keys."""
    q, k, v, do, is_causal = draw_long(rng, shape)
    trace = check(run, rng, expect, q, k, v, do, is_causal, {}, factor=LONG_FACTOR)
    (small,) = run.trace(probes.attend, *(x[..., :64, :] for x in (q, k, v)), is_causal, {})
    what, itemsize = LONG[shape]
    never_holds(
        trace, small, what, itemsize * q.shape[-2] * k.shape[-2], needs=3 * (2 * q.nbytes + k.nbytes + v.nbytes),
        seen=lambda: run(metered, APPLY, [q, k, v, is_causal], 3),
    )  # fmt: skip
