"""What was seen beside the steps of a run: what the scaler was told, what layers worked with, what was left over.

By what probes_precision.train saw.
"""

from __future__ import annotations

from lab.judge import harmless


@harmless
def told_of(got: dict, finite: list[bool]) -> str:
    """What the scaler was told, step by step, where that is not once how the step went."""
    told = [[word for at, word in got["told"] if at == step] for step in range(len(finite))]
    if not any(told):
        return f": scaler.update was called in no step of {len(finite)}"
    wrong = [
        f"in step {i} " + (" and ".join(f"with finite={w}" for w in words) or "not at all") + f", not with finite={f}"
        for i, (words, f) in enumerate(zip(told, finite, strict=True))
        if words != [f]
    ]
    return f": scaler.update was called {'; '.join(wrong[:3])}{'; …' * (len(wrong) > 3)}" if wrong else (
        ": scaler.update was called once in each step, and rightly: was scale set by anybody else?"
    )  # fmt: skip


@harmless
def computed(got: dict, dtype: str) -> str:
    """What the first layer worked with, the first time that it was not this dtype alone."""
    where = ((i, *call) for i, call in enumerate(got["where"]) if call != [dtype, dtype, ""])
    i, x, weight, autocast = next(where)
    changed = f": the model was converted from {dtype[6:]}" if weight != dtype else ""
    state = f"on, to {autocast[6:]}" if autocast else "off"
    return f"; in its call {i} its input was {x[6:]}, its weight {weight[6:]}{changed}, and autocast was {state}"


@harmless
def left_over(got: dict, step: int) -> str:
    """Whether gradients of that step are still there after it."""
    count = got["leftover"][step]
    return f": after step {step} .grad of {count} of the model's parameters is neither None nor 0" if count else ""
