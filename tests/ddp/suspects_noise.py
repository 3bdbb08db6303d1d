"""What the noise scale comes to where one thing of it is wrong, so that a message can name the thing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lab.judge import harmless

NAMES = ("gradient_squared", "trace", "noise_scale")
Lengths = tuple[list[float], float]  # squared: of each rank's gradient, and of their mean


def lengths(shares: list) -> Lengths:
    """shares: [rank][parameter]."""
    columns = [torch.stack([g.double() for g in c]) for c in zip(*shares, strict=True) if c[0] is not None]
    return [math.fsum(float(c[r].square().sum()) for c in columns) for r in range(len(shares))], math.fsum(
        float(c.mean(0).square().sum()) for c in columns
    )


@harmless
def because(told: Sequence[dict], steps: list, samples: int, decay: float, at: int) -> str:
    """What makes the estimates of all steps what they are; "" if that is not known. steps: [step][rank][parameter].

    at: the place of this rank among those of the group.
    """
    world, found = len(steps[0]), [lengths(shares) for shares in steps]
    right = _estimates(found, at, samples, decay)
    for cause, how in _readings(samples, world, decay):
        other = _estimates(found, at, samples, decay, **how)
        if all(_same(t[n], o[n]) for t, o in zip(told, other, strict=True) for n in NAMES) and not all(
            _same(r[n], o[n]) for r, o in zip(right, other, strict=True) for n in NAMES
        ):
            return cause
    return ""


def _same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-4 * max(abs(a), abs(b))


def _readings(samples: int, world: int, decay: float) -> Iterator[tuple[str, dict[str, Any]]]:
    for small, big in ((samples / world, samples), (1, world), (samples, samples + world), (world, samples * world)):
        yield (
            f"it is what batches of {small:g} and {big:g} samples would give: the small one is a rank's, {samples}, "
            f"the big one all {world} ranks', {samples * world}",
            {"sizes": (small, big)},
        )
    yield "the small batch's squared length is this rank's alone: it is the mean over ranks", {"small": _own}
    yield f"squared lengths are summed over the ranks: divide by {world}", {"small": lambda all, at, big: sum(all)}
    yield (
        "lengths are averaged over the ranks, and the mean is squared: it is squares that are averaged",
        {"small": lambda all, at, big: (sum(map(math.sqrt, all)) / len(all)) ** 2},
    )
    yield (
        "the small batch's squared length is that of the averaged gradient: before() is to measure before they are "
        "averaged in place",
        {"small": lambda all, at, big: big},
    )
    if decay != 1:
        yield f"a step counts as much as the one after it, though decay is {decay:.3g}", {"decay": 1.0}
    yield "it is the last step's estimate alone", {"decay": 0.0}
    yield "the scale is a mean of the steps' ratios: it is the ratio of the means", {"ratios": True}
    yield "estimates below 0 are cut off", {"least": 0.0}


def _own(all: list[float], at: int, big: float) -> float:
    return all[at]


def _estimates(
    found: list[Lengths], at: int, samples: int, given: float, *, sizes: tuple[float, float] | None = None,
    small: Callable[[list[float], int, float], float] = lambda all, at, big: sum(all) / len(all),
    ratios: bool = False, least: float = -math.inf, decay: float | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """After each step, as somebody may have computed it."""
    decay, told = given if decay is None else decay, []
    g = trace = weight = scales = 0.0
    for every, big in found:
        b, more = sizes or (samples, samples * len(every)), small(every, at, big)
        one = max(least, (b[1] * big - b[0] * more) / (b[1] - b[0]))
        two = max(least, (more - big) / (1 / b[0] - 1 / b[1]))
        g, trace, weight = decay * g + one, decay * trace + two, decay * weight + 1
        scales = decay * scales + (two / one if one else math.inf)
        scale = scales / weight if ratios else trace / g if g > 0 else math.inf
        told.append({"gradient_squared": g / weight, "trace": trace / weight, "noise_scale": scale})
    return told
