"""Attention by one whole matrix, in any dtype: float64 gives the oracle, the inputs' own dtype the tolerance."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WHERE = ["interpret", *(["native"] if torch.cuda.is_available() else [])]
# Triton's interpreter multiplies bit patterns of bfloat16, so this dtype is tested only on a GPU.
PRECISIONS = ["float32", "float16", *(["bfloat16"] if torch.cuda.is_available() else [])]
# In a call that launches kernels, torch may only allocate, make views, and cast.
ALLOWED = {
    "new_full", "full_like", "ones", "ones_like", "new_ones", "empty_permuted", "split_with_sizes", "_reshape_alias",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros", "zeros_like",
    "full", "view", "reshape", "expand", "transpose", "t", "permute", "slice", "select", "unsqueeze", "squeeze",
    "as_strided", "detach", "alias", "_unsafe_view", "lift_fresh", "_to_copy", "fill_", "zero_", "unflatten", "unbind",
}  # fmt: skip


LARGEST = 256  # rows of a tile


def attention(q, k, v, is_causal, dtype: str) -> dict:
    """o and lse; grouped heads are repeated."""
    wanted = getattr(torch, dtype)
    q, k, v = q.to(wanted), *(repeated(x.to(wanted), q) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return {"o": s.softmax(-1) @ v, "lse": s.to(torch.promote_types(s.dtype, torch.float32)).logsumexp(-1)}


def gradients(q, k, v, do, is_causal, dtype: str) -> dict:
    """dq, dk and dv, by autograd."""
    wanted = getattr(torch, dtype)
    q, k, v = (x.to(wanted).requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, is_causal, dtype)["o"]
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do.to(wanted)), strict=True))


def given_to_backward(expect, q, k, v, do, is_causal) -> dict:
    """Inputs of a backward kernel: o, lse and delta of attention, computed in float64 and then rounded."""
    out = expect(attention, q, k, v, is_causal, "float64")
    o = out["o"].to(q.dtype)
    delta = (do.double() * o.double()).sum(-1).float()
    return {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": out["lse"].float(), "delta": delta}


def tiles(got: dict) -> tuple[int, int]:
    """Most rows of a store, and of a load. Asserts that none covers whole rows or columns of scores.

    A program may not hold whole rows or columns either: they grow with the length, and would not fit on a GPU.
    """
    block, tile = (max((len(rows) for *_, rows in got[n]), default=0) for n in ("stores", "loads"))
    assert 0 < block <= LARGEST, f"a store covers {block} rows: a program's tile has 1 to {LARGEST}"
    assert 0 < tile <= LARGEST, (
        f"a load covers {tile} rows, expected tiles of 1 to {LARGEST}: whole rows or columns of scores are not tiles"
    )
    most = 2 * max(block, tile, got["width"]) ** 2
    assert got["largest"] <= most, (
        f"a program holds a tensor of {got['largest']:,} elements; it stores tiles of {block} rows and loads tiles of "
        f"{tile}, {got['width']} wide: what it holds may not grow with the length, so use each tile and let go of it"
    )
    return block, tile


def room(q, where: str) -> str:
    """Where this case can run."""
    return "native" if q.dtype is torch.bfloat16 else where


def described(q, k, is_causal, layout="") -> str:
    return f"{tuple(q.shape)} queries, {tuple(k.shape)} keys{', causal' * is_causal}{layout and ', ' + layout}"


def recomputed(given: dict, is_causal: bool, dtype: str) -> dict:
    """dq, dk and dv from the lse and delta that are given: P = exp(S − lse), dS = P ∘ (do vᵀ − delta); delta from o."""
    wanted = getattr(torch, dtype)
    statistics = torch.promote_types(wanted, torch.float32)
    q, k, v, do, o = (given[n].to(wanted) for n in ("q", "k", "v", "do", "o"))
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    k, v = repeated(k, q), repeated(v, q)
    lse, delta = (given[n].to(statistics)[..., None] for n in ("lse", "delta"))
    p = torch.exp((q @ k.mT * scale).to(statistics) - lse)
    if is_causal:
        p = p.masked_fill(torch.ones(p.shape[-2:], dtype=torch.bool).triu(1), 0.0)
    ds = (p * ((do @ v.mT).to(statistics) - delta)).to(wanted)
    dk, dv = ds.mT @ q * scale, p.to(wanted).mT @ do
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    rowsum = (do.to(statistics) * o.to(statistics)).sum(-1)
    return {"dq": ds @ k * scale, "dk": dk, "dv": dv, "delta": rowsum}


def rounding(got, want, dtype: torch.dtype) -> tuple[float, float]:
    """(mean error of got, mean error of rounding the exact result once to dtype)."""
    errors = got.double() - want, want.to(dtype).double() - want
    return errors[0].abs().mean().item(), errors[1].abs().mean().item()


def repeated(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if x.ndim == 4 else x


def draw(rng, queries, keys, *, batch=None, heads=None, group=1, dim=None, dtype="float32", scale=1.0):
    """q, k, v and do; q is `scale` times a normal one."""
    batch, kv_heads = batch or rng.integers(1, 2), heads or rng.integers(1, 2)
    dim = dim or rng.choice([16, 24, 32, 40, 64])
    of = {"dtype": DTYPES[dtype]}
    q, do = (rng.normal(batch, kv_heads * group, queries, dim, **of) for _ in range(2))
    return q * scale, rng.normal(batch, kv_heads, keys, dim, **of), rng.normal(batch, kv_heads, keys, dim, **of), do


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton for this system")
