"""Probe of attention: set memory layouts, call it, return its result and what it saved for backward."""

from lab.harness.callers import CallerTensors
from lab.harness.layouts import lay_out_all


def attend(impl, q, k, v, is_causal, layouts: dict) -> dict:
    """o, and the tensors saved for backward (inputs by name). layouts: memory layouts of q, k and v."""
    inputs = {n: t.detach().requires_grad_() for n, t in lay_out_all({"q": q, "k": k, "v": v}, layouts).items()}
    caller = CallerTensors(**inputs)
    o = impl.flash_attention.tiled_forward.TiledAttention.apply(*inputs.values(), is_causal)
    saved = getattr(o.grad_fn, "saved_tensors", ())
    saved = [next((n for n, x in inputs.items() if x is t), t) for t in saved]
    return {"o": o, "saved": saved, "callers": caller.seen()}
