"""Attention in any dtype, a few rows at a time: float64 is the oracle, the inputs' dtype gives the tolerance."""

import importlib.util
import math

import pytest
import torch

from lab.harness import layouts

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODES = ["interpret", *(["native"] if torch.cuda.is_available() else [])]
# Triton's interpreter multiplies bit patterns of bfloat16, so this dtype is tested only on a GPU.
PRECISIONS = ["float32", "float16", *(["bfloat16"] if torch.cuda.is_available() else [])]
# In a call that launches kernels, torch may only allocate, make views, and cast.
ALLOWED = {
    "new_full", "full_like", "ones", "ones_like", "new_ones", "empty_permuted", "split_with_sizes", "_reshape_alias",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros", "zeros_like",
    "full", "view", "reshape", "expand", "transpose", "t", "permute", "slice", "select", "unsqueeze", "squeeze",
    "as_strided", "detach", "alias", "_unsafe_view", "lift_fresh", "_to_copy", "fill_", "zero_", "unflatten", "unbind",
}  # fmt: skip
MAX_ROWS = 256  # rows of a tile


def by_rows(q, k, is_causal):
    """Yield (rows, their scores), per head at most 32 MiB of float64 scores at a time."""
    rows = max(1, (1 << 22) // k.shape[-2])
    for start in range(0, q.shape[-2], rows):
        i = slice(start, start + rows)
        s = q[..., i, :] @ k.mT / math.sqrt(q.shape[-1])
        if is_causal:
            s = s.masked_fill(torch.arange(s.shape[-1]) > torch.arange(start, start + s.shape[-2])[:, None], -math.inf)
        yield i, s


def attention(q, k, v, is_causal, dtype: str) -> dict:
    """o and lse; grouped heads are repeated."""
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, repeated(k, q), repeated(v, q)))
    o, lse = [], []
    for _, s in by_rows(q, k, is_causal):
        o.append(s.softmax(-1) @ v)
        lse.append(s.to(torch.promote_types(s.dtype, torch.float32)).logsumexp(-1))
    return {"o": torch.cat(o, -2), "lse": torch.cat(lse, -1)}


def gradients(q, k, v, do, is_causal, dtype: str) -> dict:
    """dq, dk and dv, by autograd."""
    torch_dtype = getattr(torch, dtype)
    q, k, v = (x.to(torch_dtype).requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, is_causal, dtype)["o"]
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do.to(torch_dtype)), strict=True))


def backward_inputs(expect, q, k, v, do, is_causal) -> dict:
    """Inputs of a backward kernel: o, lse and delta of attention, computed in float64 and then rounded."""
    out = expect(attention, q, k, v, is_causal, "float64")
    o = out["o"].to(q.dtype)
    delta = (do.double() * o.double()).sum(-1).float()
    return {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": out["lse"].float(), "delta": delta}


def tiles(got: dict) -> tuple[int, int]:
    """Most rows of a store, and of a load. Assert that no access covers whole rows or columns of scores.

    A program may not hold whole rows or columns either: they grow with the length, and do not fit on a GPU.
    """
    block, tile = (max((len(rows) for *_, rows in got[n]), default=0) for n in ("stores", "loads"))
    assert 0 < block <= MAX_ROWS, f"a store covers {block} rows: a program's tile has 1 to {MAX_ROWS}"
    assert 0 < tile <= MAX_ROWS, (
        f"a load covers {tile} rows, expected tiles of 1 to {MAX_ROWS}: whole rows or columns of scores are not tiles"
    )
    limit = 2 * max(block, tile, got["width"]) ** 2
    assert got["largest"] <= limit, (
        f"a program holds a tensor of {got['largest']:,} elements; it stores tiles of {block} rows and loads tiles of "
        f"{tile}, {got['width']} wide: what it holds may not grow with the length, so use each tile and let go of it"
    )
    return block, tile


def recomputed(given: dict, is_causal: bool, dtype: str) -> dict:
    """dq, dk and dv from the given lse and delta: P = exp(S − lse), dS = P ∘ (do vᵀ − delta). Also delta, from o.

    dtype: "float64", or the inputs' dtype: then compute in float32, and round P and dS, as tensor cores require.
    """
    narrow, wide = getattr(torch, dtype), torch.float64 if dtype == "float64" else torch.float32
    q, k, v, do, o, lse, delta = (given[n].to(wide) for n in ("q", "k", "v", "do", "o", "lse", "delta"))
    group, scale = group_size(k, q), q.shape[-1] ** -0.5
    k, v = repeated(k, q), repeated(v, q)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for i, s in by_rows(q, k, is_causal):
        p = torch.exp(s - lse[..., i, None])
        ds = (p * (do[..., i, :] @ v.mT - delta[..., i, None])).to(narrow).to(wide)
        dq[..., i, :] = ds @ k * scale
        dk += ds.mT @ q[..., i, :] * scale
        dv += p.to(narrow).to(wide).mT @ do[..., i, :]
    if group > 1:
        dk, dv = (x.unflatten(-3, (-1, group)).sum(-3) for x in (dk, dv))
    return {"dq": dq.to(narrow), "dk": dk.to(narrow), "dv": dv.to(narrow), "delta": (do * o).sum(-1)}


def rounding(got, want, dtype: torch.dtype) -> tuple[float, float]:
    """(mean error of got, mean error of rounding the exact result once to dtype)."""
    errors = got.double() - want, want.to(dtype).double() - want
    return errors[0].abs().mean().item(), errors[1].abs().mean().item()


def check_each(run, probe, cases: list[dict], judge):
    """Judge each case's result. If it fails, name the operand whose layout is the cause. Return the trace."""
    (trace,) = run.trace(probe, cases)
    for case, got in zip(cases, trace.values, strict=True):

        def judge_layout(layout: dict[str, str], case=case, got=got) -> None:
            if layout != case["layouts"]:
                (got,) = run(probe, [case | {"layouts": layout}])
            judge(case | {"layouts": layout}, got)

        layouts.blame(case["layouts"], judge_layout)
    return trace


def group_size(x, q) -> int:
    return q.shape[:-2].numel() // x.shape[:-2].numel()


def repeated(x, q):
    return x if (group := group_size(x, q)) == 1 else x.repeat_interleave(group, dim=-3)


def draw(rng, queries, keys, *, batch=None, heads=None, group=1, dim=None, dtype="float32", scale=1.0):
    """Draw q, k, v and do; q is multiplied by `scale`."""
    batch, kv_heads = batch or rng.integers(1, 2), heads or rng.integers(1, 2)
    dim = dim or rng.choice([16, 24, 32, 40, 64])
    kw = {"dtype": DTYPES[dtype]}
    q, do = (rng.normal(batch, kv_heads * group, queries, dim, **kw) for _ in range(2))
    return q * scale, rng.normal(batch, kv_heads, keys, dim, **kw), rng.normal(batch, kv_heads, keys, dim, **kw), do


def lengths(rng) -> list[tuple[int, int]]:
    """(queries, keys): less than a tile, about one, several; then equal lengths, more keys, more queries."""
    drawn = [(rng.integers(*bounds), rng.integers(*bounds)) for bounds in ((1, 15), (33, 60), (130, 170))]
    n, extra = rng.integers(66, 140), rng.integers(5, 90)
    return [*drawn, (n, n), (n, n + extra), (n + extra, n)]


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this system")
