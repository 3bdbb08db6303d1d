"""FlashAttention-2's forward pass, by tiles.

What must be true: o and lse are those of softmax(q kᵀ / √dim) v for any lengths, masks, strides and dtypes, and no
matrix of queries × keys exists at any time. How it would be faked: compute the whole matrix and return the right
numbers (the storages made and saved are measured); call the library's attention (forbidden, and its operators show);
handle only multiples of the tile (lengths are drawn so that they are none); skip the running maximum (logits × 50).
"""

from __future__ import annotations

import math

import pytest
import torch

from lab.judge import close, measured
from lab.pytest_plugin import exercise

from . import probes
from .suspects import of_forward

TILED = "flash_attention.tiled_forward"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def oracle(q, k, v, is_causal) -> dict:
    """Attention in float64, one matrix at a time."""
    q, k, v = q.double(), k.double(), v.double()
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return {"o": s.softmax(-1) @ v, "lse": s.logsumexp(-1)}


def plain(q, k, v, is_causal) -> dict:
    """The same in the inputs' dtype, as one would write it: its error is the yardstick."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return {"o": s.softmax(-1) @ v, "lse": s.float().logsumexp(-1)}


def draw(rng, queries, keys, batch=(2,), dim=None, dtype=torch.float32, scale=1.0):
    dim = dim or rng.choice([16, 24, 32, 40])
    q = rng.normal(*batch, queries, dim, dtype=dtype) * scale
    return q, rng.normal(*batch, keys, dim, dtype=dtype), rng.normal(*batch, keys, dim, dtype=dtype)


def lse_of(got, q):
    """The one saved tensor that has a number for each query."""
    found = [t for t in got["saved"] if t.shape == q.shape[:-1]]
    shapes = [tuple(t.shape) for t in got["saved"]]
    assert len(found) == 1, (
        f"expected one saved tensor of shape {tuple(q.shape[:-1])}, the log-sum-exp of each query; saved: {shapes}"
    )
    return found[0]


def check(run, expect, q, k, v, is_causal, layout="contiguous"):
    got = run(probes.attend, q, k, v, is_causal, layout)
    want, yardstick = expect(oracle, q, k, v, is_causal), expect(plain, q, k, v, is_causal)
    what = f"{layout} q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, is_causal={is_causal}"
    assert got["o"].dtype == q.dtype, f"o is {got['o'].dtype}, q is {q.dtype}: return o in q's dtype"
    for name, tensor, dims in (("o", got["o"], "batch, query, dim"), ("lse", lse_of(got, q), "batch, query")):
        close(
            tensor, want[name], yardstick[name], f"{name} of {what}", dims=dims,
            suspects=lambda name=name: of_forward(name, q, k, v, is_causal),
        )  # fmt: skip


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_lse_are_those_of_attention(run, rng, expect, dtype, is_causal):
    n = rng.integers(2, 3) * 128
    check(run, expect, *draw(rng, n, n, dtype=DTYPES[dtype]), is_causal)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_lengths_need_not_be_multiples_of_a_tile(run, rng, expect, is_causal):
    n = 128 * rng.integers(1, 2) + rng.choice([1, 7, 33, 63, 65, 127])
    check(run, expect, *draw(rng, n, n), is_causal)
    short = rng.integers(1, 15)
    check(run, expect, *draw(rng, short, short), is_causal)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_queries_and_keys_may_differ_in_number(run, rng, expect, is_causal):
    few, many = rng.integers(3, 90), rng.integers(150, 280)
    check(run, expect, *draw(rng, few, many), is_causal)
    check(run, expect, *draw(rng, many, few), is_causal)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("dims", ["none", "one", "two", "three"])
def test_any_leading_dimensions(run, rng, expect, dims):
    batch = [rng.integers(1, 3) for _ in range(["none", "one", "two", "three"].index(dims))]
    check(run, expect, *draw(rng, 70, 70, batch), True)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("layout", ["transposed", "strided", "broadcast"])
def test_strides_do_not_matter(run, rng, expect, layout):
    q, k, v = draw(rng, 90, 75, batch=(2, 2))
    if layout == "broadcast":
        q, k, v = (t[:1].expand_as(t) for t in (q, k, v))
    check(run, expect, q, k, v, True, layout)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_fifty_times_larger_do_not_overflow(run, rng, expect, dtype):
    q, k, v = draw(rng, 150, 150, dtype=DTYPES[dtype], scale=50.0)
    got = run(probes.attend, q, k, v, True)
    assert torch.isfinite(got["o"]).all(), "o is not finite: is the running maximum subtracted before exp?"
    check(run, expect, q, k, v, True)


@exercise(TILED, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_accumulated_in_float32(run, rng, expect, dtype):
    """A long row of keys: sums kept in 16 bits drift away from what one rounding at the end would give."""
    q, k, v = draw(rng, 16, 2000, batch=(1,), dim=16, dtype=DTYPES[dtype])
    v = v.abs()  # sums that grow
    got = run(probes.attend, q, k, v, False)
    want = expect(oracle, q, k, v, False)
    rounded = (got["o"].double() - want["o"]).abs().mean()
    unavoidable = (want["o"].to(DTYPES[dtype]).double() - want["o"]).abs().mean()
    lse_error = (lse_of(got, q).double() - want["lse"]).abs().max().item()
    other = "lse is right: acc is" if lse_error <= 1e-4 else f"lse is off by {lse_error:.1e}, too: l is"
    assert rounded <= 1.5 * unavoidable, (
        f"mean error of o is {rounded / unavoidable:.1f} times that of rounding once to {dtype}: "
        f"keep products and sums in float32 until the end; {other} rounded on the way"
    )
    assert lse_error <= 1e-4, f"lse is off by {lse_error:.1e} after 2,000 keys: keep the sum in float32"


@exercise(TILED, kind="numerics")
def test_what_backward_needs_is_saved(run, rng):
    q, k, v = draw(rng, 60, 50)
    got = run(probes.attend, q, k, v, False)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("o", got["o"])):
        assert any(t.shape == tensor.shape and torch.equal(t, tensor) for t in got["saved"]), (
            f"{name} is not among the saved tensors (shapes {[tuple(t.shape) for t in got['saved']]}): "
            "ctx.save_for_backward(q, k, v, o, lse)"
        )
    lse_of(got, q)


@exercise(TILED, kind="property")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_matrix_of_queries_by_keys_exists(run, rng, is_causal):
    n, batch = 1024, rng.integers(2, 3)
    got = run(probes.memory, *draw(rng, n, n, (batch,), dim=32), is_causal)
    bound = n * n // 2  # of one batch entry already: the mask too is such a matrix
    measured(f"largest storage at N = {n:,}", got["largest_elements"], bound, "elements", at_most=True)
    assert got["largest_elements"] < bound, (
        f"{got['largest_op']} made a storage of {got['largest_elements']:,} elements; "
        f"queries × keys is {n * n:,}: a tile has at most 128 × 128"
    )
    assert max(got["saved_largest_elements"], got["stashed_elements"]) < bound, (
        "a matrix of scores is kept for backward"
    )


@exercise(TILED, kind="property")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_process_does_not_hold_the_matrix_either(run, rng, is_causal):
    """What is computed outside of torch is memory too."""
    n, dim = 2048 + rng.integers(0, 64), rng.choice([16, 32])
    bound = 4 * n * n // 2
    got = run(probes.grown, draw(rng, 256, 256, (1,), dim=dim), draw(rng, n, n, (1,), dim=dim), is_causal)
    if got < 0:
        pytest.skip("only Linux tells how much memory a process has held")
    assert got < bound, (
        f"the process grew by {got / 1e6:.1f} MB; queries × keys in float32 are {4 * n * n / 1e6:.1f}, q, k, v and o "
        f"{16 * n * dim / 1e6:.1f}: the whole matrix is somewhere, in torch or not"
    )


@exercise(TILED, kind="property")
def test_bytes_grow_linearly_with_length(run, rng):
    dim, is_causal = rng.choice([16, 32]), rng.choice([False, True])
    small, large = (run(probes.memory, *draw(rng, n, n, (1,), dim=dim), is_causal) for n in (1024, 2048))
    for what in ("saved_bytes", "peak_bytes"):
        ratio = large[what] / small[what]
        measured(f"{what} at twice the length", ratio, 2.1, "times", at_most=True)
        assert ratio <= 2.1, (
            f"{what} went from {small[what]:,} at N=1,024 to {large[what]:,} at N=2,048, {ratio:.2f} times: "
            "linear is 2, quadratic is 4"
        )


@exercise(TILED, kind="property")
def test_the_librarys_attention_is_not_used(run, rng):
    got = run(probes.memory, *draw(rng, 64, 64), True)
    library = [op for op in got["ops"] if "attention" in op]
    assert not library, f"{library[0]} was called: the exercise is to write it"


@exercise(TILED, kind="property")
def test_keys_are_visited_tile_by_tile(run, rng):
    """Few queries, many keys: whole rows of scores would be larger than the inputs, tiles are not."""
    queries, keys, dim, batch = 128, 8192, 16, rng.integers(1, 2)
    got = run(probes.memory, *draw(rng, queries, keys, (batch,), dim=dim), False)
    bound = batch * max(keys * dim, 128 * 128)
    assert got["largest_elements"] <= bound, (
        f"{got['largest_op']} made a storage of {got['largest_elements']:,} elements for {batch}·{queries} queries and "
        f"{keys:,} keys; k has {batch * keys * dim:,}: a tile of scores has at most 128 × 128, whole rows are not tiles"
    )
