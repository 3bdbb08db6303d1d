"""What runs beside the single steps: lay tensors out as asked, call, say what came back and what was seen meanwhile."""

from __future__ import annotations

import torch

from lab.measure.kernels import addresses, watching
from lab.measure.memory import meter
from lab.measure.process import poisoned
from lab.raising import raised

from .probes import _lay

# ---- weighted sums ----


def weighted_sums(impl, cases: list[dict]) -> list:
    """y, or {dx, dweight} where a case has dy, of each case; memory that was not written is NaN.

    A case: x, weight, perhaps dy, and layout: how the three lie in memory when they arrive.
    """
    results = []
    for case in cases:
        with poisoned(), watching():
            out = _weighted_sum(impl, *_arguments(case))
        results.append({"dx": out[0], "dweight": out[1]} if "dy" in case else out)
    return results


def weighted_sum_kernels(impl, case: dict) -> dict:
    """What one call launches and what its kernels touch, and whether a second call is equal to the last bit."""
    arguments = _arguments(case)
    with poisoned():
        with watching(keep=True) as seen:
            out = _weighted_sum(impl, *arguments)
        again = _weighted_sum(impl, *arguments)
    out, again = (o if isinstance(o, tuple) else (o,) for o in (out, again))
    read, written = seen.touched("load"), seen.touched("store", "atomic")
    of = {name: [set(addresses(t).flatten().tolist()) for t in ts] for name, ts in (("in", arguments), ("out", out))}
    return {
        "launches": [launch.kernel for launch in seen.launches],
        "operators": seen.operators,
        "atomics": seen.atomics,
        "unread": [len(each - read) for each in of["in"]],
        "unwritten": [len(each - written) for each in of["out"]],
        "written_inputs": sum(len(each & written) for each in of["in"]),
        "raced": seen.races(),
        "contiguous": all(o.is_contiguous() for o in out),
        "equal": all(torch.equal(a, b) for a, b in zip(out, again, strict=True)),
    }


def refused_shapes(impl, shapes: list) -> list[str]:
    """What weighted_sum_forward raises for each (shape of x, shape of weight)."""
    function = impl.flash_attention.weighted_sum_forward.weighted_sum_forward
    return [raised(lambda x=x, w=w: function(torch.zeros(x), torch.zeros(w))) for x, w in shapes]


def _weighted_sum(impl, x, weight, dy=None):
    if dy is None:
        return impl.flash_attention.weighted_sum_forward.weighted_sum_forward(x, weight)
    return impl.flash_attention.weighted_sum_backward.weighted_sum_backward(x, weight, dy)


def _arguments(case: dict) -> list[torch.Tensor]:
    return [laid(case[name], case["layout"]) for name in ("x", "weight", "dy") if name in case]


def laid(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out otherwise; a layout that a vector cannot have leaves it as it is."""
    if layout == "weight alone":
        return laid(t, "strided") if t.ndim == 1 else t
    if layout == "transposed":
        return t.mT.contiguous().mT if t.ndim > 1 else t
    if layout == "strided":
        wide = torch.full([3 * n + 2 for n in t.shape], float("nan"), dtype=t.dtype)
        inner = wide[tuple(slice(1 + d, 1 + d + (3 - d) * n, 3 - d) for d, n in enumerate(t.shape))]
        return inner.copy_(t)
    if layout == "rows apart":  # of x only: columns lie side by side
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), float("nan"), dtype=t.dtype)
        return wide[..., : t.shape[-1]].copy_(t)
    if layout == "broadcast rows":
        return t[:1].expand_as(t)
    if layout == "broadcast columns":
        return t[..., :1].expand_as(t)
    return t


# ---- online softmax ----


def softmax_statistics(impl, cases: list[dict]) -> list[dict]:
    """maximum, normaliser and lse of each case's tiles; generator: they come from one. changed: a tile was modified."""
    results = []
    for case in cases:
        tiles = [t.clone() for t in case["tiles"]]
        given = (t for t in tiles) if case.get("generator", True) else tiles
        got = _statistics(impl, given)
        changed = any(not torch.equal(a, b) for a, b in zip(tiles, case["tiles"], strict=True))
        results.append({**got, "changed": changed})
    return results


def softmax_of_many(impl, seed: torch.Tensor, factors: list[float]) -> list[dict]:
    """The same of tiles that are made when they are asked for: seed times each factor."""
    return [{**_statistics(impl, (seed * factor for factor in factors)), "changed": False}]


def softmax_memory(impl, seed: torch.Tensor, factors: list[float]) -> dict:
    """What that allocates, as torch's dispatcher sees it."""
    with meter(inputs=(seed,)) as measured:
        _statistics(impl, (seed * factor for factor in factors))
    return measured.plain()


def _statistics(impl, tiles) -> dict:
    got = impl.flash_attention.online_softmax.online_softmax(tiles)
    return {"maximum": got.maximum, "normaliser": got.normaliser, "lse": got.lse}


def softmax_of_nothing(impl) -> list[str]:
    """What is raised for an empty list and for an empty generator."""
    function = impl.flash_attention.online_softmax.online_softmax
    return [raised(lambda: function([])), raised(lambda: function(t for t in ()))]


# ---- tiled backward ----


def attention_gradients(impl, q, k, v, o, lse, do, is_causal, layout="contiguous") -> dict:
    """dq, dk, dv; layout: how all but lse lie in memory. changed: an argument was modified."""
    arguments = [_lay(t, layout) for t in (q, k, v, o)] + [lse, _lay(do, layout)]
    if layout == "constant":  # as a sum's gradient comes: one number, broadcast
        arguments[-1] = do.flatten()[0].expand(do.shape)
    before = [t.clone() for t in arguments]
    got = impl.flash_attention.tiled_backward.tiled_backward(*arguments, is_causal)
    names = ("q", "k", "v", "o", "lse", "do")
    changed = [n for n, t, b in zip(names, arguments, before, strict=True) if not torch.equal(t, b)]
    return {**dict(zip(("dq", "dk", "dv"), got, strict=True)), "changed": changed}


def backward_memory(impl, q, k, v, o, lse, do, is_causal) -> dict:
    """What one call allocates, as torch's dispatcher sees it."""
    with meter(inputs=(q, k, v, o, lse, do)) as measured:
        impl.flash_attention.tiled_backward.tiled_backward(q, k, v, o, lse, do, is_causal)
    return measured.plain()


# ---- counting ----


def occupancies(impl, cases: list[dict]) -> list:
    """What occupancy says of each case, or the name of what it raises; limits: those of another multiprocessor."""
    module = impl.flash_attention.occupancy
    found = []
    for case in cases:
        kernel = (case["registers"], case["shared_bytes"], case["warps"])
        if case.get("refused"):
            found.append(raised(lambda k=kernel: module.occupancy(*k)))
            continue
        limits = (module.Multiprocessor(**case["limits"]),) if "limits" in case else ()
        got = module.occupancy(*kernel, *limits)
        found.append({"programs": got.programs, "warps": got.warps, "share": got.share, "limited_by": got.limited_by})
    return found


def costs(impl, cases: list[dict]) -> list[dict]:
    """What accounting says of each case's arguments."""
    found = [impl.flash_attention.accounting.accounting(**case) for case in cases]
    return [{"flops": c.flops, "bytes": c.bytes, "intensity": c.intensity} for c in found]


# ---- fused cross entropy ----


def fused_losses(impl, cases: list[dict]) -> list[dict]:
    """Loss and gradients of each case: x, weight, targets, chunk (None: the default), incoming gradient, how often the
    loss is computed before backward begins, and whether x and weight need a gradient. changed: arguments that were
    modified, as they are now."""
    found = []
    for case in cases:
        x, weight, targets = case["x"].clone(), case["weight"].clone(), case["targets"].clone()
        x.requires_grad_(case.get("needs", (True, True))[0])
        weight.requires_grad_(case.get("needs", (True, True))[1])
        chunk = () if case["chunk"] is None else (case["chunk"],)
        losses = [_fused(impl, x, weight, targets, *chunk) for _ in range(case.get("times", 1))]
        loss = losses[-1]
        torch.autograd.backward(losses, [torch.full_like(loss, case["dloss"])] * len(losses))
        given = {"x": x, "weight": weight, "targets": targets}
        found.append({
            "loss": loss, "dx": x.grad, "dweight": weight.grad,
            "changed": {n: t.detach() for n, t in given.items() if not torch.equal(t, case[n])},
        })  # fmt: skip
    return found


def fused_refusals(impl, x, weight, targets, chunks: list[int]) -> list[str]:
    """What is raised for each chunk."""
    function = impl.flash_attention.fused_cross_entropy.FusedCrossEntropy
    return [raised(lambda c=c: function.apply(x, weight, targets, c)) for c in chunks]


def fused_memory(impl, case: dict) -> dict:
    """What one forward pass allocates, as torch's dispatcher sees it."""
    x, weight = case["x"].requires_grad_(), case["weight"].requires_grad_()
    with meter(inputs=(x, weight, case["targets"])) as measured:
        _fused(impl, x, weight, case["targets"], case["chunk"])
    return measured.plain()


def _fused(impl, *inputs) -> torch.Tensor:
    return impl.flash_attention.fused_cross_entropy.FusedCrossEntropy.apply(*inputs)
