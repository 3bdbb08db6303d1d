"""What LARS and LAMB come to where one thing of them is wrong, so that a message can name the thing.

All in float64, and asked for only where a comparison has failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lab.judge import harmless

NEAR = 1e-4  # of a parameter's largest value: many times what float32 rounds in some steps
BOTH = {
    "no ratio": "the ratio is 1 for all layers: it is the optimizer that this one was made from",
    "no decay": "there is no weight decay in it",
    "excluded decays": "what exclude_1d leaves out has a ratio of 1, and decays all the same",
    "excluded has a ratio": "what exclude_1d leaves out does not decay, and has its ratio all the same",
    "nothing is excluded": "exclude_1d is not looked at",
    "vectors alone": "exclude_1d leaves out what has one dimension, and not what has none",
    "zero": "the ratio is 0 where the weights are 0, and the layer never moves",
    "first lr": "lr is that of the first step in all of them: it is read from its group in every step",
    "own first lr": "lr is that of a parameter's first step in all of them: it is read from its group in every step",
}
OTHERWISE = {
    "LARS": {
        **BOTH,
        "norm of g": "λ is η ‖w‖ / ‖g‖: the weight decay β ‖w‖ is missing below",
        "norm of both": "below, λ has the norm of g + β w, not ‖g‖ + β ‖w‖",
        "no trust": "λ has no η in it",
        "outside": "lr and λ multiply v, and not what is added to it: each gradient belongs with the ratio of its step",
        "after": "the weight decay is added to the step, outside λ and the momentum",
    },
    "LAMB": {
        **BOTH,
        "no correction": "m and v are used as they are: m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ) are missing",
        "under the root": "ε is under the root, √(v̂ + ε) for √v̂ + ε",
        "after": "λ w is added after the ratio, as AdamW does: it is part of u, and of its norm",
        "in the gradient": "λ w is added to the gradient, as Adam with L2 does: it is part of u, outside m and v",
        "one count": "t counts the optimizer's steps: a parameter's own t counts those in which it had a gradient",
    },
}


@harmless
def explain(
    kind: str, weights: list, groups: list, defaults: dict, gradients: list, factors: tuple, got: list[list[Tensor]]
) -> str:
    """What weights `got`, [step][parameter], are instead; "" if it is not known. defaults: with what was asked for."""
    wide = [[w.double() for w in step] for step in got]
    for how, cause in OTHERWISE[kind].items():
        other = trajectory(kind, weights, groups, defaults, gradients, factors, how)
        if all(map(_near, itertools.chain(*wide), itertools.chain(*other))):
            return f"all of it is as where {cause}"
    return ""


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= NEAR * float(b.abs().max()) + 1e-12


def trajectory(
    kind: str, weights: list, groups: list, defaults: dict, gradients: list, factors: tuple, how: str
) -> list[list[Tensor]]:
    """[step][parameter]; how: a key of OTHERWISE, "" for the equations."""
    own = {i: {**defaults, **more} for indices, more in groups for i in indices}
    columns = [
        [*_weights(kind, w, own.get(i, defaults), [step[i] for step in gradients], factors, how)]
        for i, w in enumerate(weights)
    ]
    return [list(step) for step in zip(*columns, strict=True)]


def _weights(kind: str, start: Tensor, o: dict, gradients: list, factors: tuple, how: str) -> Iterable[Tensor]:
    w, t = start.double(), 0
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    plain = o["exclude_1d"] and (w.dim() == 1 if how == "vectors alone" else w.dim() < 2)
    ratio_is_1 = how == "no ratio" or (plain and how not in ("nothing is excluded", "excluded has a ratio"))
    decays = how != "no decay" and (not plain or how in ("nothing is excluded", "excluded decays"))
    decay, first = o["weight_decay"] if decays else 0.0, [g is not None for g in gradients].index(True)
    for step, gradient in enumerate(gradients):
        lr = o["lr"] * (factors[{"first lr": 0, "own first lr": first}.get(how, step)] if factors else 1)
        if gradient is not None:
            g, t = gradient.double(), step + 1 if how == "one count" else t + 1
            if kind == "LARS":
                below = {"norm of g": g.norm(), "norm of both": (g + decay * w).norm()}
                share = (1.0 if how == "no trust" else o["trust"]) / below.get(how, g.norm() + decay * w.norm())
                ratio = 1.0 if ratio_is_1 else _ratio(w.norm() * share, w, g, how)
                inside = g if how == "after" else g + decay * w
                m = o["momentum"] * m + (1.0 if how == "outside" else lr * ratio) * inside
                w = w - m * (lr * ratio if how == "outside" else 1.0) - (lr * decay * w if how == "after" else 0.0)
            else:
                one, two = o["betas"]
                g = g + decay * w if how == "in the gradient" else g
                m, v = one * m + (1 - one) * g, two * v + (1 - two) * g * g
                mean, square = (m, v) if how == "no correction" else (m / (1 - one**t), v / (1 - two**t))
                u = mean / ((square + o["eps"]).sqrt() if how == "under the root" else square.sqrt() + o["eps"])
                inside = how not in ("after", "in the gradient")
                u = u + decay * w if inside else u
                ratio = 1.0 if ratio_is_1 else _ratio(w.norm() / u.norm(), w, u, how)
                w = w - lr * ratio * (u + decay * w if how == "after" else u)
        yield w


def _ratio(ratio: Tensor, w: Tensor, other: Tensor, how: str) -> float:
    """1 where a norm is 0."""
    if float(w.norm()) > 0 and float(other.norm()) > 0:
        return float(ratio)
    return 0.0 if how == "zero" and math.isfinite(float(ratio)) else 1.0
