"""FlashAttention-2's backward pass, by tiles.

What must be true: dq, dk and dv are those of attention for any lengths, masks, strides and dtypes, from o and lse alone
of what forward knew, and neither the matrix of queries × keys nor whole rows or columns of it exist at any time. How it
would be faked: compute them, in torch or not (the kernel's books say how large the process was, in runs whose numbers
are judged); return anything where it is long (numerics have the same lengths); let autograd do it (forbidden); handle
only multiples of the tile; forget the mask in one of the three gradients; keep sums in 16 bits.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from lab.harness import layouts
from lab.harness.calls import metered
from lab.harness.diagnose import amended
from lab.harness.judge import close, never_holds
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import Trace

from . import probes_steps as probes
from . import test_tiled_forward as tiled
from .oracles import DTYPES, rounding
from .test_tiled_forward import LONG, LONG_FACTOR, rows_at_a_time

BACKWARD = "flash_attention.tiled_backward"
CALL = "impl.flash_attention.tiled_backward.tiled_backward"
NAMES = ("dq", "dk", "dv")


def scores(q, k, is_causal, first=0):
    """Of queries first, first + 1 … and all keys."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    rows = torch.arange(first, first + q.shape[-2])[:, None]
    return s.masked_fill(torch.arange(k.shape[-2]) > rows, -math.inf) if is_causal else s


def forward(q, k, v, is_causal) -> dict:
    """What forward hands over, from float64: o in the inputs' dtype, lse in float32."""
    out = tiled.oracle(q, k, v, is_causal)
    return {"o": out["o"].to(q.dtype), "lse": out["lse"].float()}


def oracle(q, k, v, do, is_causal) -> dict:
    """By autograd through attention in float64, some rows at a time."""
    k, v = (t.double().requires_grad_() for t in (k, v))
    dq, rows = [], rows_at_a_time(k)
    for i, (q_i, do_i) in enumerate(zip(q.double().split(rows, -2), do.double().split(rows, -2), strict=True)):
        q_i = q_i.detach().requires_grad_()
        (scores(q_i, k, is_causal, i * rows).softmax(-1) @ v).backward(do_i)
        dq.append(q_i.grad)
    return {"dq": torch.cat(dq, -2), "dk": k.grad, "dv": v.grad}


def formula(q, k, v, o, lse, do, is_causal, dtype, rounded) -> dict:
    """Algorithm 2 on some whole rows, in `dtype`; with factors of products rounded as tensor cores want them."""
    given = q.dtype
    q, k, v, o, lse, do = (t.to(dtype) for t in (q, k, v, o, lse, do))
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[-2], rows := rows_at_a_time(k)):
        i = slice(start, start + rows)
        q_i, do_i = q[..., i, :], do[..., i, :]
        p = torch.exp(scores(q_i, k, is_causal, start) - lse[..., i, None])
        ds = p * (do_i @ v.mT - (do_i * o[..., i, :]).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        if rounded:
            p, ds = p.to(given).to(dtype), ds.to(given).to(dtype)
        dq.append(ds @ k)
        dk, dv = dk + ds.mT @ q_i, dv + p.mT @ do_i
    return {"dq": torch.cat(dq, -2), "dk": dk, "dv": dv}


def plain(q, k, v, o, lse, do, is_causal) -> dict:
    """The yardstick: float32 sums of products of the inputs' dtype, rounded once."""
    return {n: t.to(q.dtype) for n, t in formula(q, k, v, o, lse, do, is_causal, torch.float32, True).items()}


draw = functools.partial(tiled.draw, backward=True)


def draw_long(rng, shape: str) -> list:
    """q, k, v, do and is_causal, as long as forward's."""
    q, k, v, is_causal = tiled.draw_long(rng, shape)
    return [q, k, v, rng.normal(*q.shape), is_causal]


def check(run, rng, expect, q, k, v, do, is_causal, lie=None, factor=3.0) -> Trace:
    """The trace of a run whose numbers are right. lie: how arguments lie in memory; otherwise it is drawn."""
    passed = expect(forward, q, k, v, is_causal)
    o = passed["o"]
    lie = layouts.draw(rng, q=q, k=k, v=v, o=o, do=do)[1] if lie is None else lie
    return layouts.blaming(
        lie, functools.partial(_check, run, expect, q, k, v, o, passed["lse"], do, is_causal, factor)
    )


def _check(run, expect, q, k, v, o, lse, do, is_causal, factor, lie) -> Trace:
    (trace,) = run.trace(probes.attention_gradients, q, k, v, o, lse, do, is_causal, lie)
    got = trace.values
    want, yardstick = expect(oracle, q, k, v, do, is_causal), expect(plain, q, k, v, o, lse, do, is_causal)
    what = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, is_causal={is_causal}, in memory: {layouts.told(lie)}"
    for name in NAMES:
        assert got[name].dtype == q.dtype, f"{name} is {got[name].dtype}, the inputs are {q.dtype}"
        try:
            close(
                got[name], want[name], yardstick[name], f"{name} of {what}", factor,
                dims=f"batch, {'query' if name == 'dq' else 'key'}, dim",
            )  # fmt: skip
        except AssertionError as error:
            raise AssertionError(amended(error, f"; {_others(name, got, want, yardstick)}")) from None
    return trace


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
    check(run, rng, expect, *draw(rng, n, n, dtype=DTYPES[dtype]), is_causal)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_lengths_need_not_be_multiples_of_a_tile(run, rng, expect, is_causal):
    n = 128 * rng.integers(1, 2) + rng.choice([1, 7, 33, 63, 65, 127])
    check(run, rng, expect, *draw(rng, n, n), is_causal)
    short = rng.integers(1, 15)
    check(run, rng, expect, *draw(rng, short, short), is_causal)
    q, k, v, do = draw(rng, 600, 600, (1,), 16)
    tiled.small_tiles(run, CALL, [q, k, v, *expect(forward, q, k, v, is_causal).values(), do, is_causal])


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_queries_and_keys_may_differ_in_number(run, rng, expect, is_causal):
    few, many = rng.integers(3, 90), rng.integers(150, 280)
    check(run, rng, expect, *draw(rng, few, many), is_causal)
    check(run, rng, expect, *draw(rng, many, few), is_causal)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dims", ["none", "one", "two", "three"])
def test_any_leading_dimensions(run, rng, expect, dims):
    batch = [rng.integers(1, 3) for _ in range(["none", "one", "two", "three"].index(dims))]
    check(run, rng, expect, *draw(rng, 70, 70, batch), True)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("case", range(4))
def test_strides_do_not_matter(run, rng, expect, case):
    q, k, v, do = draw(rng, 90, 75, batch=(2, 2))
    given, lie = layouts.different(rng, q=q, k=k, v=v, do=do)
    check(run, rng, expect, *given.values(), True, {**lie, "o": rng.choice(layouts.ALIGNED)})


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_fifty_times_larger(run, rng, expect, dtype):
    check(run, rng, expect, *draw(rng, 150, 150, dtype=DTYPES[dtype], scale=50.0), True)


@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_accumulated_in_float32(run, rng, expect, dtype):
    """Long sums over keys for dq, over queries for dk and dv: in 16 bits they drift away from one rounding."""
    for names, queries, keys in ((("dq",), 16, 2000), (("dk", "dv"), 2000, 16)):
        q, k, v, do = draw(rng, queries, keys, batch=(1,), dim=16, dtype=DTYPES[dtype])
        do = do * 16
        passed = expect(forward, q, k, v, False)
        arguments = (q, k, v, passed["o"], passed["lse"], do, False)
        got, want = run(probes.attention_gradients, *arguments, {}), formula(*arguments, torch.float64, False)
        for name in names:
            error, unavoidable = rounding(got[name], want[name], DTYPES[dtype])
            assert error <= 2 * unavoidable, (
                f"mean error of {name} with {queries:,} queries and {keys:,} keys is {error / unavoidable:.1f} times "
                f"that of rounding once to {dtype}: are the products and sums kept in float32 until the end?"
            )


@exercise(BACKWARD, kind="numerics")
def test_long_sequences(run, rng, expect):
    check(run, rng, expect, *draw_long(rng, rng.choice(["many keys", "many queries"])), {}, factor=LONG_FACTOR)


@exercise(BACKWARD, kind="property")
@pytest.mark.parametrize("shape", LONG)
def test_scores_exist_tile_by_tile_alone(run, rng, expect, shape):
    """Memory does not grow with queries × keys, nor, for a few queries, with keys, nor for a few keys with queries."""
    q, k, v, do, is_causal = inputs = draw_long(rng, shape)
    trace = check(run, rng, expect, *inputs, {}, factor=LONG_FACTOR)

    def given(q, k, v, do) -> list:
        return [q, k, v, *expect(forward, q, k, v, is_causal).values(), do, is_causal]

    (small,) = run.trace(probes.attention_gradients, *given(*draw(rng, 64, 64, (1,), q.shape[-1])), {})
    what, itemsize = LONG[shape]
    never_holds(
        trace, small, what, itemsize * q.shape[-2] * k.shape[-2], needs=3 * (4 * q.nbytes + 2 * (k.nbytes + v.nbytes)),
        seen=lambda: run(metered, CALL, given(q, k, v, do)),
    )  # fmt: skip
