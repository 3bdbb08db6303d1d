"""What the norm of a gradient that is spread over a mesh comes to where numbers are counted more or less than once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from .probes_placed import AXES, coordinate, cut_along


def of_norm(layout: dict, ranks: list, rank: int) -> Iterator[tuple[str, float]]:
    """What this rank may tell. ranks: what each of them told of one limit: names, and gradients before."""
    degrees = layout["degrees"]
    places = [coordinate(degrees, r) for r in range(len(ranks))]
    held = [
        (r, name, float(torch.linalg.vector_norm(g.double() / _unit(ranks))), _sharded(ranks, places, r, i))
        for r, told in enumerate(ranks)
        for i, (name, g) in enumerate(zip(told["names"], told["before"], strict=True))
        if g is not None and name
    ]
    axes = [axis for axis in AXES if degrees.get(axis, 1) > 1]

    def length(counts) -> float:
        return _unit(ranks) * math.sqrt(math.fsum(x**2 for r, name, x, cut in held if counts(r, name, cut)))

    def copies(name: str, sharded: bool) -> set:
        tied = layout["tied"] and name == "embedding.weight"
        there = {"pipe": tied, "data": not sharded, "expert": ".experts." not in name}
        there["tensor"] = cut_along(name.split(" + ")[0], degrees.get("tensor", 1)) is None
        return {axis for axis in axes if there[axis]}

    def first(r: int, along: set) -> bool:
        return all(places[r][axis] == 0 for axis in along)

    yield "it is the norm of what this rank has", length(lambda r, name, cut: r == rank)
    mine = length(lambda r, name, cut: r == rank and first(r, copies(name, cut)))
    yield "it is of what this rank counts alone: sum over all ranks", mine
    own = _unit(ranks) * math.fsum(x for r, name, x, cut in held if first(r, copies(name, cut)))
    yield "norms of parameters are added: their squares are, and the root is taken at the end", own
    ours = math.fsum(
        math.sqrt(math.fsum(x**2 for r, name, x, cut in held if r == s and first(r, copies(name, cut))))
        for s in range(len(ranks))
    )
    yield "norms of ranks are added: their squares are, and the root is taken at the end", _unit(ranks) * ours
    right = length(lambda r, name, cut: first(r, copies(name, cut)))
    yield "it is the square of the norm: the root of the sum of squares", right**2
    kinds = {
        "the embedding, to which the head is tied": lambda name, cut: layout["tied"] and name == "embedding.weight",
        "experts": lambda name, cut: ".experts." in name,
        "what is no expert": lambda name, cut: ".experts." not in name,
        "what is sharded over data": lambda name, cut: cut,
        "what tensor has not cut (norms, routers)": lambda name, cut: "tensor" in copies(name, False),
        "what tensor has cut": lambda name, cut: "tensor" not in copies(name, False),
        "every parameter": lambda name, cut: True,
    }
    names = {(name, cut) for _, name, _, cut in held}
    for (kind, is_of), axis in itertools.product(kinds.items(), axes):
        if kind != "every parameter" and len([name for name in names if is_of(*name)]) in (0, len(names)):
            continue
        for has in (True, False):  # as if it had copies along this axis, or had not

            def counts(r, name, cut, is_of=is_of, axis=axis, has=has) -> bool:
                along = copies(name, cut)
                return first(r, (along | {axis} if has else along - {axis}) if is_of(name, cut) else along)

            told = "of the ranks along {} the first alone counts, and others have other numbers" if has else (
                "each of the ranks along {} counts, and they have copies"
            )  # fmt: skip
            yield f"{kind}: {told.format(axis)}", length(counts)
    yield (
        "the copies of all ranks count: each number on the one rank that has coordinate 0 along its copies",
        length(lambda r, name, cut: True),
    )
    for n in range(1, len(axes)):
        for some in itertools.combinations(axes, n):
            group = [
                r for r in range(len(ranks)) if all(places[r][a] == places[rank][a] for a in axes if a not in some)
            ]
            cause = f"it is summed over ranks {group}, those along {' × '.join(some)}: over all ranks of the mesh"
            yield cause, length(lambda r, name, cut, group=group: r in group and first(r, copies(name, cut)))
            there = length(lambda r, name, cut, group=group: r in group)
            yield f"{cause}, each number once", there


def _unit(ranks: list) -> float:
    """The largest number: squares of what is measured in it neither overflow nor vanish."""
    return max([float(g.double().abs().max()) for told in ranks for g in told["before"] if g is not None and g.numel()])


def _sharded(ranks: list, places: list, r: int, i: int) -> bool:
    """Whether the i-th parameter of a rank is another on other data ranks."""
    others = [s for s in range(len(ranks)) if places[s] == {**places[r], "data": places[s]["data"]}]
    values = [ranks[s]["before"][i] for s in others]
    return any(v is None or v.shape != values[0].shape or not torch.equal(v, values[0]) for v in values)
