"""Ranks in a mesh of four axes, and their groups.

What must be true: rank and coordinate are each other's inverse, tensor innermost and data outermost; the groups of an
axis, or of several, are a partition of the ranks, and each rank gets the process group of its own part; a rank alone,
or a product that is an axis already, needs no group of its own. How it would be got wrong: axes in another order (with
equal degrees no shape tells, so degrees differ here); groups along the others' axes; groups made by their members
alone, which waits for ever; a group a call, which leaks connections; an error that says only that degrees are wrong.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy
import pytest

from lab.harness.judge import harmless, measured
from lab.harness.pytest_plugin import exercise

from . import probes_mesh as probes
from .carried import asked, messages

MESH = "mesh.mesh"
AXES = ["data", "pipe", "expert", "tensor"]
SUBSETS = [list(c) for n in range(1, 5) for c in itertools.combinations(AXES, n)]


def partition(degrees, axes) -> list:
    """Groups along these axes, by moving them to the end of an array of ranks."""
    grid = numpy.arange(math.prod(degrees)).reshape(degrees)
    inner = [AXES.index(axis) for axis in AXES if axis in axes]
    size = math.prod(degrees[i] for i in inner)
    return numpy.moveaxis(grid, inner, range(4 - len(inner), 4)).reshape(-1, size).tolist()


def draw_paper(rng, degrees) -> dict:
    world = math.prod(degrees)
    moves = [[rng.choice(AXES), rng.integers(-3, 3), rng.choice([True, False])] for _ in range(12)]
    return {
        "degrees": degrees,
        "here": rng.integers(0, world - 1),
        "ranks": [0, world - 1, *(rng.integers(0, world - 1) for _ in range(6))],
        "axes": [[], *(rng.shuffled(axes) for axes in rng.shuffled(SUBSETS)[:4]), [rng.choice(AXES)]],
        "moves": moves,
    }


@pytest.fixture
def paper(run, rng):
    """Draw meshes on paper, small ones and ones of thousands of ranks; return cases and answers."""
    cases = [draw_paper(rng, [rng.integers(1, 4) for _ in AXES]) for _ in range(4)]
    cases += [draw_paper(rng, rng.shuffled([2, 3, 4, 5])), draw_paper(rng, [16, 4, 2, 8])]
    return list(zip(cases, run(probes.on_paper, cases), strict=True))


def placed(degrees, rank) -> list:
    return [[a, int(p)] for a, p in zip(AXES, numpy.unravel_index(rank, degrees), strict=True)]


@exercise(MESH, kind="numerics")
def test_a_rank_is_a_place_in_an_array_of_all_ranks(paper):
    for case, got in paper:
        degrees, here = case["degrees"], case["here"]
        what = f"a mesh of {degrees} ({' x '.join(AXES)})"
        assert got["sizes"] == [list(pair) for pair in zip(AXES, degrees, strict=True)], f"{what}: {got['sizes']}"
        assert got["world"] == math.prod(degrees), f"{what}: world {got['world']}"
        for rank, coordinate, back in zip([here, *case["ranks"]], [got["here"], *got["coordinates"]],
                                          [here, *got["ranks_back"]], strict=True):  # fmt: skip
            assert coordinate == placed(degrees, rank), (
                f"{what}: rank {rank} is at {coordinate}, expected {placed(degrees, rank)}: tensor changes fastest, "
                "data slowest"
            )
            assert back == rank, f"{what}: the rank at {coordinate} is {rank}, got {back}"


@exercise(MESH, kind="numerics")
def test_axes_that_are_not_named_are_where_this_rank_is(paper):
    for case, got in paper:
        places = dict(placed(case["degrees"], case["here"]))
        want = []
        for axis, n in zip(AXES, case["degrees"], strict=True):
            for place in (0, n - 1):
                at = list({**places, axis: place}.values())
                want.append(int(numpy.ravel_multi_index(at, case["degrees"])))
        zeros = [
            int(numpy.ravel_multi_index([place if a == axis else 0 for a in AXES], case["degrees"]))
            for axis, n in zip(AXES, case["degrees"], strict=True)
            for place in (0, n - 1)
        ]
        taken = ": axes that are not named are taken for 0" if got["counterparts"] == zeros else ""
        assert got["counterparts"] == want, (
            f"rank {case['here']} of {case['degrees']}: the first and last rank along each axis in turn are {want}, "
            f"got {got['counterparts']}{taken}: of the others, this rank's own coordinates"
        )


@harmless
def of_the_others(degrees: list, axes: list, groups: list) -> str:
    """Say so if these are the groups along the axes that were not named."""
    others = [axis for axis in AXES if axis not in axes]
    if sorted(groups) != sorted(partition(degrees, others)):
        return ""
    return f"; these are the groups along {' and '.join(others) or 'no axis'}, the axes that were not named"


@harmless
def in_another_order(groups: list, want: list) -> str:
    """Say so if these are the right groups, or groups of the right ranks, in another order."""
    if sorted(map(sorted, groups)) != want:
        return ""
    return f", {'groups' if sorted(groups) == want else 'ranks of a group'} in another order"


def brief(ranks: list[int] | None) -> str:
    """The first few of a group."""
    if ranks is None:
        return "no group"
    return str(ranks) if len(ranks) <= 12 else f"{str(ranks[:12])[:-1]}, … {len(ranks)} ranks]"


@exercise(MESH, kind="numerics")
def test_groups_on_paper(paper):
    for case, got in paper:
        for axes, size, groups, own in zip(case["axes"], got["size"], got["partition"], got["own"], strict=True):
            want = partition(case["degrees"], axes)
            what = f"a mesh of {case['degrees']}, groups along {axes or 'no axis'}"
            assert size == len(want[0]), f"{what}: their size is {len(want[0])}, got {size}"
            wrong = next((pair for pair in itertools.zip_longest(groups, want) if pair[0] != pair[1]), None)
            assert wrong is None, (
                f"{what}: got {brief(wrong[0])} where {brief(wrong[1])} is expected{in_another_order(groups, want)}: "
                "a group is all ranks that agree in every axis but its own; ranks, and first ranks, ascend"
                f"{of_the_others(case['degrees'], axes, groups)}"
            )
            mine = next(g for g in want if case["here"] in g)
            assert own == mine, (
                f"{what}: ranks() of rank {case['here']} is {brief(own)}, expected {brief(mine)}"
                f"{in_another_order([own], [mine])}"
            )


@exercise(MESH, kind="numerics")
def test_neighbours_end_at_the_ends_unless_the_axis_is_a_ring(paper):
    for case, got in paper:
        for (axis, offset, wrap), neighbour in zip(case["moves"], got["neighbours"], strict=True):
            n, places = dict(got["sizes"])[axis], dict(placed(case["degrees"], case["here"]))
            place = (places[axis] + offset) % n if wrap else places[axis] + offset
            at = list({**places, axis: place}.values())
            want = int(numpy.ravel_multi_index(at, case["degrees"])) if 0 <= place < n else None
            ring = int(numpy.ravel_multi_index(list({**places, axis: place % n}.values()), case["degrees"]))
            assert neighbour == want, (
                f"rank {case['here']} of {case['degrees']}, at {places}: {offset:+} along {axis}, wrap={wrap}: "
                f"expected {want}, got {neighbour}"
                + (
                    ": that is the ring's, and wrap is False: beyond an end there is nobody"
                    if neighbour == ring
                    else ""
                )
                + (": with wrap, both ends are neighbours" if wrap and neighbour is None else "")
            )


@exercise(MESH, kind="numerics")
def test_what_is_not_there_is_refused(run, rng):
    told = run(probes.refused, [rng.integers(1, 3) for _ in AXES])
    for what, error in told.items():
        want = "RuntimeError" if what.endswith("on paper") else "ValueError"
        assert error == want, f"{what}: expected {want}, got {error}"


@exercise(MESH, kind="numerics")
def test_degrees_that_do_not_fit_are_told_what_would(run, rng):
    world = rng.choice([4, 6])
    degrees = [[1, 1, 1, 1], [world, 2, 1, 1], [1, 3, 1, 4], [2, 1, 1, 5], [1, 1, world + 1, 1]]
    degrees = [rng.shuffled(d) for d in degrees]
    for case, message in zip(degrees, run(probes.misfits, degrees, world=world)[0], strict=True):
        product = math.prod(case)
        if product == world:
            assert not message, f"{case} was refused on {world} ranks: {message}"
            continue
        assert message, f"{case} was taken on {world} ranks"
        given = set(zip(AXES, case, strict=True))
        mends = {(a, world * n // product) for a, n in given if world * n % product == 0}
        told = {(a, int(n)) for a, n in re.findall(r"([a-z]+)=(\d+)", message) if a in AXES}
        assert mends <= told, (
            f"{case} on {world} ranks: {sorted(mends)} would fit, changed alone, and the message does not say so: "
            f"{message!r}"
        )
        assert told <= mends | given, (
            f"{case} on {world} ranks: {sorted(told - mends - given)} does not fit: {message!r}"
        )


@pytest.fixture(params=["2 axes", "3 axes", "16 ranks"])
def ranks(request, run, rng):
    """(degrees, axes, what each rank told and sent)"""
    degrees = {"2 axes": [1, 1, 2, 3], "3 axes": [1, 2, 2, 2], "16 ranks": [2, 2, 2, 2]}[request.param]
    degrees = rng.shuffled(degrees)
    axes = [[a] for a in AXES] + [
        rng.shuffled(s) for s in rng.shuffled(SUBSETS[4:])[: 3 if len(set(degrees)) == 1 else 6]
    ]
    return degrees, axes, asked(run, probes.groups, degrees, axes, world=math.prod(degrees), parts=["mesh", "sums"])


@exercise(MESH, kind="property")
def test_groups_partition_the_ranks_along_their_axes(ranks):
    degrees, axes, told = ranks
    for rank, got in enumerate(told):
        assert got["here"] == got["rank"] == rank, f"rank {rank} takes itself for {got['here']}"
        for names, total in zip(axes, got["sums"], strict=True):
            want = next(g for g in partition(degrees, names) if rank in g)
            have = [r for r in range(math.prod(degrees)) if total >> r & 1]
            assert have == want, (
                f"rank {rank} of {degrees}: its group along {names} reaches ranks {have}, expected {want}"
            )
        made, sums = got["sent"]["mesh"], [row["group"] for row in got["sent"]["sums"]]
        assert not made, f"rank {rank}: {len(made)} messages to make groups, {messages(made[:3])} …; none is needed"
        want = [next(g for g in partition(degrees, names) if rank in g) for names in axes]
        assert sums == want, f"rank {rank} of {degrees}: its groups along {axes} are {sums}, expected {want}"


@exercise(MESH, kind="property")
def test_a_group_is_made_once(ranks):
    degrees, axes, told = ranks
    wide = {tuple(a for a in AXES if a in names and degrees[AXES.index(a)] > 1) for names in axes}
    for rank, got in enumerate(told):
        axes_made = [axis for axis, n in zip(AXES, degrees, strict=True) if n > 1]
        assert got["made"] >= len(axes_made), (
            f"rank {rank} of {degrees}: {got['made']} groups exist when the mesh has been made, expected those of "
            f"{', '.join(axes_made)}: members alone can ask for them later, and all ranks must make a group"
        )
        assert got["refused"] == ["ValueError"] * 2, (
            f"rank {rank}: group('model'), group('data', 'data'): raised {got['refused']}, expected ValueError of both"
        )
        forgotten = [names for names, same in zip(axes, got["again"], strict=True) if not same]
        assert not forgotten, (
            f"rank {rank}: group{tuple(forgotten[0])} and then group{tuple(forgotten[0][::-1])} are two groups, "
            "expected one: it is made once, and the order of axes does not matter"
        )
        measured("groups that a rank is put into", got["joined"], len(wide), at_most=True)
        assert got["joined"] <= len(wide), (
            f"rank {rank} of {degrees}: it was put into {got['joined']} groups for {len(axes)} that were asked for, of "
            f"which only {len(wide)} differ in ranks: an axis of degree 1 adds nobody, and a group costs connections"
        )
