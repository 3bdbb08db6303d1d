"""What runs beside an attention: make tensors with the strides asked for, call it, say what it returned and kept."""

from __future__ import annotations

import torch

from lab.measure.memory import meter


def attend(impl, q, k, v, is_causal, layout="contiguous") -> dict:
    """o, and what was saved for backward, an input by its name. layout: how q, k and v lie in memory."""
    inputs = {n: _lay(t, layout).requires_grad_() for n, t in (("q", q), ("k", k), ("v", v))}
    o = impl.flash_attention.tiled_forward.TiledAttention.apply(*inputs.values(), is_causal)
    saved = getattr(o.grad_fn, "saved_tensors", ())
    return {"o": o, "saved": [next((n for n, x in inputs.items() if x is t), t) for t in saved]}


def _lay(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out otherwise: as a transpose, as every other row of a larger tensor, or broadcast."""
    if layout == "transposed":
        return t.mT.contiguous().mT.detach()
    if layout == "strided":
        wide = torch.full((*t.shape[:-2], 2 * t.shape[-2], t.shape[-1] + 3), float("nan"), dtype=t.dtype)
        wide[..., ::2, : t.shape[-1]] = t
        return wide[..., ::2, : t.shape[-1]].detach()
    if layout == "broadcast":
        return t[:1].expand_as(t).detach()
    return t


def memory(impl, q, k, v, is_causal) -> dict:
    """What one forward pass allocates and keeps, as torch's dispatcher sees it."""
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with meter(inputs=(q, k, v)) as measured:
        impl.flash_attention.tiled_forward.TiledAttention.apply(q, k, v, is_causal)
    return measured.plain()
