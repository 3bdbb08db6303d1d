"""What becomes of tokens on their way to experts and home where one thing is wrong: lists and loops, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.judge import Suspects, harmless


def because(got: Any, suspects: Iterable[tuple[str, Any]], otherwise: str) -> str:
    """The first cause whose value is what came, or what is said otherwise."""
    met = harmless(lambda: next((cause for cause, value in suspects if value == got), ""))
    return met() or otherwise


# ---- capacity ----


def of_capacity(experts: Tensor, n: int, factor: float) -> Iterator[tuple[str, list]]:
    """What may be kept: lists as `experts.tolist()`."""
    tokens, k = experts.shape
    by_choice = [(t, c) for c in range(k) for t in range(tokens)]
    by_token = [(t, c) for t in range(tokens) for c in range(k)]
    limit = math.ceil(factor * tokens * k / n)

    def kept(order: list, most: int, gone: int = -1, one_queue: bool = False, strict: bool = False) -> list:
        left, taken = experts.tolist(), [0] * n
        for t, c in order:
            queue = 0 if one_queue else left[t][c]
            place, taken[queue] = taken[queue], taken[queue] + 1
            if place >= most - strict:
                left[t][c] = gone
        return left

    if k > 1:
        yield (
            "a token's second choice queues before the next token's first: all first choices come first",
            kept(by_token, limit),
        )
        yield "the limit is that of one choice a token: multiply by k", kept(by_choice, math.ceil(limit / k))
    yield "what is dropped becomes expert 0, expected −1", kept(by_choice, limit, gone=0)
    yield "what is dropped becomes the last expert, expected −1", kept(by_choice, limit, gone=n - 1)
    yield "one queue for all experts: each has its own", kept(by_choice, limit, one_queue=True)
    yield (
        "one fewer than the limit is kept: the places in a queue are 0 … limit − 1",
        kept(by_choice, limit, strict=True),
    )
    yield "one more than the limit is kept: the places in a queue are 0 … limit − 1", kept(by_choice, limit + 1)
    last = [(t, c) for c in range(k) for t in reversed(range(tokens))]
    yield "the last of a queue are kept, not the first", kept(last, limit)
    for most in range(1, tokens * k):  # whatever the limit of one queue is
        cause = f"the first {most} choices are kept, whatever their experts: each expert has a queue of its own"
        yield cause, kept(by_choice, most, one_queue=True)
    yield "nothing is dropped", experts.tolist()


def of_limits(sizes: Sequence[tuple[int, int, int, float]]) -> Iterator[tuple[str, list[int]]]:
    """What the limits of some numbers of tokens, choices of each, experts and factors may be, all in the same way."""
    for cause, limit in (
        ("it is rounded down, expected", lambda tokens, k, n, factor: math.floor(factor * tokens * k / n)),
        ("it is rounded to the nearest, expected", lambda tokens, k, n, factor: round(factor * tokens * k / n)),
        ("each token has k choices:", lambda tokens, k, n, factor: math.ceil(factor * tokens / n)),
        ("each token has k choices, and it is rounded up:", lambda tokens, k, n, factor: int(factor * tokens / n)),
        ("it is not divided by the number of experts:", lambda tokens, k, n, factor: math.ceil(factor * tokens * k)),
    ):
        yield cause, [limit(*size) for size in sizes]


# ---- there and home ----


def leaving(case: dict) -> list:
    """(expert, token, choice) of what a rank sends, in the order that dispatch documents."""
    k = case["experts"].shape[1]
    rows = [(int(case["experts"][t, c]), t, c) for t in range(len(case["x"])) for c in range(k)]
    return sorted(row for row in rows if row[0] >= 0)


def arriving(cases: list, place: int, interleaved: bool = False) -> list:
    """(source, expert, token, choice) of what a rank is sent, in the order it arrives."""
    world, each = len(cases), cases[0]["n"] // len(cases)
    return [(s, *row) for s, case in enumerate(cases) for row in leaving(case)
            if (row[0] % world if interleaved else row[0] // each) == place]  # fmt: skip


def of_counts(cases: list, place: int) -> Iterator[tuple[str, list]]:
    """What may be said of how many rows each of a rank's experts has."""
    world, n = len(cases), cases[0]["n"]
    each = n // world

    def count(sources: list, experts: Iterable[int], choices: int | None = None, gone: bool = False) -> list:
        flat = [e for case in sources for e in case["experts"][:, :choices].flatten().tolist()]
        return [sum((e % n if gone else e) == expert for e in flat) for expert in experts]

    own = range(place * each, (place + 1) * each)
    yield "first choices alone are sent", count(cases, own, choices=1)
    yield "choices that were dropped are counted, as of the last expert: −1 in Python", count(cases, own, gone=True)
    yield "they are of experts place, place + E, …: rank e has a block", count(cases, range(place, n, world))
    yield "they are of this rank's tokens alone, not of all ranks'", count([cases[place]], own)
    yield "they are of the first experts: this rank's begin at place · n / E", count(cases, range(each))
    yield (
        "they are how many rows come from each rank",
        [sum(row[0] == s for row in arriving(cases, place)) for s in range(world)],
    )


def of_tokens(cases: list, place: int) -> Iterator[tuple[str, list]]:
    """What tokens may be there: lists."""
    rows = arriving(cases, place)

    def taken(order: Iterable) -> list:
        return [cases[s]["x"][t].tolist() for s, _, t, _ in order]

    yield "they are as they arrived, by rank: order them by expert, stably", taken(rows)
    by_expert = sorted(rows, key=lambda row: (row[1], row[2], row[0]))
    yield "of one expert they are ordered by token: by the rank they come from, then by token", taken(by_expert)
    unsorted = [row for s in range(len(cases)) for row in sorted(rows, key=lambda r: (r[2], r[3])) if row[0] == s]
    yield "rows leave in the order of tokens: by expert", taken(unsorted)
    into = sorted(range(len(rows)), key=lambda i: rows[i][1])
    scattered = [0] * len(rows)
    for i, source in enumerate(into):
        scattered[source] = i
    yield (
        "the permutation is the other way around: gathered where it is to be scattered",
        taken(rows[i] for i in scattered),
    )


def of_gradient(case: dict) -> Suspects:
    """The gradient of a rank's tokens, each times the sum of (expert + 1) of its choices."""
    x, weights = case["x"].double(), (case["experts"] + 1).double()
    k = weights.shape[1]
    if x.any():
        yield "nothing comes back: is `x` detached on its way?", 0 * x
    for c in range(k if k > 1 else 0):
        cause = f"it is that of choice {c} alone: each choice adds, where several write one row the last one stays"
        yield cause, x * weights[:, c : c + 1]
    yield "where several choices write one row the last one stays: each adds", x * weights.amax(1, keepdim=True)
    if k > 1:
        yield "it is the mean of its choices', not the sum", x * weights.mean(1, keepdim=True)
    rows = leaving(case)
    for mine in (max, min):  # whoever is written last, or first, by expert
        picked = torch.zeros_like(x)
        for t in range(len(x)):
            of = [e for e, token, _ in rows if token == t]
            picked[t] = x[t] * (mine(of) + 1) if of else 0
        yield "where several choices write one row the last one stays: each adds", picked
    yield from _of_rows(x, rows)


def _of_rows(x: Tensor, rows: list) -> Suspects:
    """Gradients of x of which one of the rows that were sent has all, or nothing."""
    each = torch.zeros(len(rows), *x.shape, dtype=torch.float64)
    for i, (e, t, _) in enumerate(rows):
        each[i, t] = x[t] * (e + 1)
    for i, (e, t, c) in enumerate(rows if len(rows) > 1 else []):
        row = f"row {i} of the {len(rows)} that were sent (token {t}, its choice {c}, expert {e})"
        yield f"it is that of {row} alone: the gradients of all rows add up", each[i]
        yield f"{row} adds nothing: the gradients of all rows add up", each.sum(0) - each[i]


def of_combined(cases: list, place: int) -> Suspects:
    """What may come home to a rank: results in another order, or weighted otherwise."""
    case, world = cases[place], len(cases)
    tokens, k = case["experts"].shape
    width = case["x"].shape[1] + 1
    there = [arriving(cases, p) for p in range(world)]
    regroup = [sorted(range(len(rows)), key=lambda i, rows=rows: rows[i][1]) for rows in there]  # tokens[i] came as …

    def result(row: tuple) -> Tensor:
        s, e, t, _ = row
        x = cases[s]["x"][t].double()
        return torch.cat([x * (e + 1), x[:1] ** 2 + e])

    def back(p: int, how: str) -> list:
        made = [result(there[p][i]) for i in regroup[p]]  # grouped by expert
        if how == "as they are":
            return made
        if how == "gathered":
            return [made[i] for i in regroup[p]]
        sent: list = [None] * len(made)
        for i, source in enumerate(regroup[p]):
            sent[source] = made[i]
        return sent

    sorted_rows = leaving(case)
    order = [t * k + c for _, t, c in sorted_rows]
    gates = case["gates"].double()

    def home(how: str, at_home: str) -> Tensor:
        rows = [r for p in range(world) for r, row in zip(back(p, how), there[p], strict=True) if row[0] == place]
        choices = torch.zeros(tokens * k, width, dtype=torch.float64)
        for i, row in enumerate(rows):
            if at_home == "right":
                choices[order[i]] = row
            elif at_home == "as they are":
                choices[i] = row
            elif order[i] < len(rows):
                choices[i] = rows[order[i]]
        return choices.view(tokens, k, width)

    right = home("right", "right")
    yield "a plain sum of the choices: each times its gate", right.sum(1)
    for how, at_home in itertools.product(("right", "as they are", "gathered"), repeat=2):
        causes = {
            "as they are": "results that {} are still ordered by expert: {}",
            "gathered": "results that {} are gathered with the permutation that is to scatter them: {}",
        }
        told = [
            causes[which].format(*words)
            for which, words in (
                (how, ("go back", "undo dispatch.regroup first")),
                (at_home, ("have come home", "undo dispatch.order")),
            )
            if which in causes
        ]
        if told:
            yield "; ".join(told), (home(how, at_home) * gates[..., None]).sum(1)
    yield "it is the mean of the choices: their sum", (right * gates[..., None]).mean(1)
    for c in range(k if k > 1 else 0):
        yield f"it is choice {c} alone: add up a token's choices", (right * gates[..., None])[:, c]
    normal = gates / gates.sum(1, keepdim=True)
    yield "gates are normalised again: they weigh as they are", (right * normal[..., None]).sum(1)
