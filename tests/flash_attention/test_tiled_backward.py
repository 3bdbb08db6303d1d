"""FlashAttention-2's backward pass, by tiles.

What must be true: dq, dk and dv are those of attention for any lengths, masks, strides and dtypes, from o and lse alone
of what forward knew, and no matrix of queries × keys exists at any time. How it would be faked: compute the whole
matrix (the storages made are measured, and the process too); let autograd do it (operators show); handle only multiples
of the tile; forget the mask in one of the three gradients; keep sums in 16 bits.
"""

from __future__ import annotations

import math

import pytest
import torch

from lab.judge import close
from lab.pytest_plugin import exercise

from . import probes_steps as probes
from .suspects import of_backward

BACKWARD = "flash_attention.tiled_backward"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = ("dq", "dk", "dv")


def scores(q, k, is_causal):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if is_causal else s


def forward(q, k, v, is_causal) -> dict:
    """What forward hands over, from float64: o in the inputs' dtype, lse in float32."""
    s = scores(q.double(), k.double(), is_causal)
    return {"o": (s.softmax(-1) @ v.double()).to(q.dtype), "lse": s.logsumexp(-1).float()}


def oracle(q, k, v, do, is_causal) -> dict:
    """By autograd through attention in float64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    gradients = torch.autograd.grad(scores(q, k, is_causal).softmax(-1) @ v, (q, k, v), do.double())
    return dict(zip(NAMES, gradients, strict=True))


def formula(q, k, v, o, lse, do, is_causal, dtype, rounded) -> dict:
    """Algorithm 2 on whole matrices, in `dtype`; with factors of products rounded as tensor cores want them."""
    given = q.dtype
    q, k, v, o, lse, do = (t.to(dtype) for t in (q, k, v, o, lse, do))
    p = torch.exp(scores(q, k, is_causal) - lse[..., None])
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    if rounded:
        p, ds = p.to(given).to(dtype), ds.to(given).to(dtype)
    return {"dq": ds @ k, "dk": ds.mT @ q, "dv": p.mT @ do}


def plain(q, k, v, o, lse, do, is_causal) -> dict:
    """The yardstick: float32 sums of products of the inputs' dtype, rounded once."""
    return {n: t.to(q.dtype) for n, t in formula(q, k, v, o, lse, do, is_causal, torch.float32, True).items()}


def draw(rng, queries, keys, batch=(2,), dim=None, dtype=torch.float32, scale=1.0) -> list:
    """q, k, v and do."""
    dim = dim or rng.choice([16, 24, 32, 40])
    q, do = (rng.normal(*batch, queries, dim, dtype=dtype) for _ in range(2))
    return [q * scale, rng.normal(*batch, keys, dim, dtype=dtype), rng.normal(*batch, keys, dim, dtype=dtype), do]


def check(run, expect, q, k, v, do, is_causal, layout="contiguous") -> None:
    passed = expect(forward, q, k, v, is_causal)
    o, lse = passed["o"], passed["lse"]
    got = run(probes.attention_gradients, q, k, v, o, lse, do, is_causal, layout)
    want, yardstick = expect(oracle, q, k, v, do, is_causal), expect(plain, q, k, v, o, lse, do, is_causal)
    what = f"{layout} q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, is_causal={is_causal}"
    given = {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": (do.double() * o.double()).sum(-1)}
    assert not got["changed"], f"{', '.join(got['changed'])} changed: arguments are the caller's ({what})"
    for name in NAMES:
        assert got[name].dtype == q.dtype, f"{name} is {got[name].dtype}, the inputs are {q.dtype}"
        try:
            close(
                got[name], want[name], yardstick[name], f"{name} of {what}",
                dims=f"batch, {'query' if name == 'dq' else 'key'}, dim",
                suspects=lambda name=name: of_backward(name, given, is_causal),
            )  # fmt: skip
        except AssertionError as error:
            raise AssertionError(f"{error}; {_others(name, got, want, yardstick)}") from None


def _others(name: str, got: dict, want: dict, yardstick: dict) -> str:
    """Which of the other two gradients are right."""
    off = []
    for other in (n for n in NAMES if n != name):
        try:
            close(got[other], want[other], yardstick[other], other)
        except AssertionError:
            off.append(other)
    right = [n for n in NAMES if n not in (name, *off)]
    if not off:
        return f"{' and '.join(right)} are right, {name} alone is off"
    return f"{' and '.join(off)} {'are' if len(off) > 1 else 'is'} off, too" + (
        f", {right[0]} is right" if right else ""
    )


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_attention(run, rng, expect, dtype, is_causal):
    n = rng.integers(2, 3) * 128
    check(run, expect, *draw(rng, n, n, dtype=DTYPES[dtype]), is_causal)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_lengths_need_not_be_multiples_of_a_tile(run, rng, expect, is_causal):
    n = 128 * rng.integers(1, 2) + rng.choice([1, 7, 33, 63, 65, 127])
    check(run, expect, *draw(rng, n, n), is_causal)
    short = rng.integers(1, 15)
    check(run, expect, *draw(rng, short, short), is_causal)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_queries_and_keys_may_differ_in_number(run, rng, expect, is_causal):
    few, many = rng.integers(3, 90), rng.integers(150, 280)
    check(run, expect, *draw(rng, few, many), is_causal)
    check(run, expect, *draw(rng, many, few), is_causal)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dims", ["none", "one", "two", "three"])
def test_any_leading_dimensions(run, rng, expect, dims):
    batch = [rng.integers(1, 3) for _ in range(["none", "one", "two", "three"].index(dims))]
    check(run, expect, *draw(rng, 70, 70, batch), True)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("layout", ["transposed", "strided", "broadcast", "constant"])
def test_strides_do_not_matter(run, rng, expect, layout):
    q, k, v, do = draw(rng, 90, 75, batch=(2, 2))
    if layout == "broadcast":
        q, k, v, do = (t[:1].expand_as(t).contiguous() for t in (q, k, v, do))
    if layout == "constant":
        do = torch.full_like(do, do.flatten()[0].item())
    check(run, expect, q, k, v, do, True, layout)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_fifty_times_larger(run, rng, expect, dtype):
    check(run, expect, *draw(rng, 150, 150, dtype=DTYPES[dtype], scale=50.0), True)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_accumulated_in_float32(run, rng, expect, dtype):
    """Long sums over keys for dq, over queries for dk and dv: in 16 bits they drift away from one rounding."""
    for names, queries, keys in ((("dq",), 16, 2000), (("dk", "dv"), 2000, 16)):
        q, k, v, do = draw(rng, queries, keys, batch=(1,), dim=16, dtype=DTYPES[dtype])
        do = do * 16
        passed = expect(forward, q, k, v, False)
        arguments = (q, k, v, passed["o"], passed["lse"], do, False)
        got, want = run(probes.attention_gradients, *arguments), formula(*arguments, torch.float64, False)
        for name in names:
            error = (got[name].double() - want[name]).abs().mean()
            unavoidable = (want[name].to(DTYPES[dtype]).double() - want[name]).abs().mean()
            assert error <= 2 * unavoidable, (
                f"mean error of {name} with {queries:,} queries and {keys:,} keys is {error / unavoidable:.1f} times "
                f"that of rounding once to {dtype}: are the products and sums kept in float32 until the end?"
            )


def arguments(rng, queries, keys, batch, dim, is_causal) -> list:
    q, k, v, do = draw(rng, queries, keys, batch, dim)
    passed = forward(q, k, v, is_causal)
    return [q, k, v, passed["o"], passed["lse"], do]


@exercise(BACKWARD, kind="property")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_matrix_of_queries_by_keys_exists(run, rng, is_causal):
    n, batch = 768, rng.integers(1, 2)
    got = run(probes.backward_memory, *arguments(rng, n, n, (batch,), 32, is_causal), is_causal)
    bound = n * n // 2  # of one batch entry already: the mask too is such a matrix
    assert got["largest_elements"] < bound, (
        f"{got['largest_op']} made a storage of {got['largest_elements']:,} elements; "
        f"queries × keys is {n * n:,}: a tile has at most 128 × 128"
    )
    library = [op for op in got["ops"] if "attention" in op]
    assert not library, f"{library[0]} was called: the exercise is to write it"


@exercise(BACKWARD, kind="property")
def test_bytes_grow_linearly_with_length(run, rng):
    dim, is_causal = rng.choice([16, 32]), rng.choice([False, True])
    small, large = (
        run(probes.backward_memory, *arguments(rng, n, n, (1,), dim, is_causal), is_causal)["peak_bytes"]
        for n in (512, 1024)
    )
    assert large <= 2.1 * small, (
        f"peak_bytes went from {small:,} at N=512 to {large:,} at N=1,024, {large / small:.2f} times: "
        "linear is 2, quadratic is 4"
    )


@exercise(BACKWARD, kind="property")
@pytest.mark.parametrize("many", ["keys", "queries"])
def test_queries_and_keys_are_visited_tile_by_tile(run, rng, many):
    """Few of one, many of the other: whole rows or columns of scores would be larger than the inputs, tiles are not."""
    queries, keys = (128, 4096) if many == "keys" else (4096, 128)
    batch, dim = rng.integers(1, 2), 16
    got = run(probes.backward_memory, *arguments(rng, queries, keys, (batch,), dim, False), False)
    bound = batch * max(4096 * dim, 128 * 128)
    assert got["largest_elements"] <= bound, (
        f"{got['largest_op']} made a storage of {got['largest_elements']:,} elements for {batch}·{queries:,} queries "
        f"and {keys:,} keys; the largest input has {batch * 4096 * dim:,}: a tile of scores has at most 128 × 128"
    )


@exercise(BACKWARD, kind="property")
def test_the_process_does_not_hold_the_matrix_either(run, rng):
    """What is computed outside of torch is memory too."""
    n, dim, is_causal = 1536 + rng.integers(0, 64), rng.choice([16, 32]), rng.choice([False, True])
    small, large = (arguments(rng, length, length, (1,), dim, is_causal) for length in (256, n))
    got = run(probes.backward_grown, small, large, is_causal)
    if got < 0:
        pytest.skip("only Linux tells how much memory a process has held")
    bound = 4 * n * n // 2
    assert got < bound, (
        f"the process grew by {got / 1e6:.1f} MB; queries × keys in float32 are {4 * n * n / 1e6:.1f}: the whole "
        "matrix is somewhere, in torch or not"
    )
