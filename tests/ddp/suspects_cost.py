"""What limits and buckets come to where one thing is taken for another, so that a message can name the thing.

A reading is told only where it gives the numbers of all cases that were asked, so that none is met by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from lab.judge import harmless, in_time


def _needed(case: dict, world: int) -> float:
    return 2 * (world - 1) * (case["alpha_s"] + case["bytes"] / world / case["bytes_per_s"])


def _most(case: dict, backward: Callable[[int], float]) -> int:
    """The most ranks with which communication takes no longer than backward, which takes so long on W ranks."""
    low, high = 1, 2
    while _needed(case, high) <= backward(high) and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _needed(case, middle) <= backward(middle) else (low, middle)
    return low


@harmless
def of_world(cases: Sequence[dict], got: Sequence[int], at: int) -> str:
    """What explains the ranks at most of all cases, said of one; "" where nothing does."""
    times: dict[str, Callable[[dict], Callable[[int], float]]] = {
        "backward takes backward_s on any number of ranks: each of more ranks has a smaller share of the global batch":
            lambda case: lambda world: case["backward_s"],
        "backward_s is that of the global batch on one rank, T₁: it is that of one share, and T₁ backward_s · world":
            lambda case: lambda world: case["backward_s"] / world,
        "backward of one sample is that of a rank's share: T₁ is backward_s · world":
            lambda case: lambda world: case["backward_s"] * case["world"] * case["samples"] / world,
    }  # fmt: skip
    for cause, backward in times.items():
        if all(abs(_most(c, backward(c)) - n) <= 1e-9 * n for c, n in zip(cases, got, strict=True)):
            return f"; {got[at]} is what one gets, here and in all {len(cases)} cases, if {cause}"
    return ""


@harmless
def of_best(cases: Sequence[dict], got: Sequence[int], step_s: Callable[[dict, int], float]) -> str:
    """What explains the best sizes of all cases; "" where nothing does. step_s: of a case, with buckets of a size."""
    for cause, candidates in _candidates():

        def met(case: dict, size: int, candidates: Callable = candidates) -> bool:
            steps = {n: step_s(case, n) for n in candidates(case)}
            return size in steps and steps[size] <= min(steps.values()) * (1 + 2e-9)

        if all(met(c, n) for c, n in in_time(zip(cases, got, strict=True))):
            return f"; as in all {len(cases)} cases, what was returned is {cause}"
    return ""


def _candidates() -> Iterator[tuple[str, Callable[[dict], set[int]]]]:
    """Where one may look for the best, the fewest first."""
    yield "the largest parameter's size", lambda case: {max(case["sizes"])}
    yield "the size of all parameters", lambda case: {sum(case["sizes"])}
    yield (
        "total · √(2(W − 1)α / backward), rounded: a rule for equal parameters, not the best",
        lambda case: {max(1, round(sum(case["sizes"]) * math.sqrt(
            2 * (case["world"] - 1) * case["alpha_s"] / case["backward_s"])))},
    )  # fmt: skip
    yield "the best of 1 and the parameters' own sizes: sums of neighbours count too", lambda case: {1, *case["sizes"]}
    yield (
        "the best of sums that end with the last parameter: others close buckets too",
        lambda case: {1, *(sum(case["sizes"][i:]) for i in range(len(case["sizes"])))},
    )
    yield (
        "the best of sums that begin with the first parameter: others close buckets too",
        lambda case: {1, *(sum(case["sizes"][:i]) for i in range(1, len(case["sizes"]) + 1))},
    )
    yield (
        "the best of the powers of two: the best of all is a sum of neighbours, or 1",
        lambda case: {2**i for i in range(sum(case["sizes"]).bit_length() + 1)},
    )


def neighbours(case: dict, size: int) -> str:
    """Of which parameters that follow each other a size is the sum."""
    sizes = case["sizes"]
    spans = [(i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1) if sum(sizes[i:j]) == size]
    if not spans:
        return ""
    i, j = min(spans, key=lambda span: span[1] - span[0])
    return f" (parameter {i} alone)" if j == i + 1 else f" (parameters {i} … {j - 1} together)"
