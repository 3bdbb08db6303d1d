"""Ranks in a mesh of four axes, and their groups.

Must hold: ranks and coordinates map one to one, tensor innermost and data outermost. Groups of one or several axes
partition the ranks, and each rank gets its own. Sets of axes that differ only by axes of degree 1 share one group.
Typical fakes: axes in another order (degrees differ here, because equal ones would hide it); groups along the other
axes; new_group called by members only, which hangs; one new group per call, which leaks connections; an error
that suggests no degrees that fit.
"""

import itertools
import math
import re

import numpy
import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_mesh as probes
from .carried import traced

MESH = "mesh.mesh"
AXES = ["data", "pipe", "expert", "tensor"]
SUBSETS = [list(c) for n in range(1, 5) for c in itertools.combinations(AXES, n)]


def partition(degrees, axes) -> list:
    """Return the groups along these axes, found by moving the axes to the end of an array of ranks."""
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
    """Query meshes without processes, small ones and one of 1024 ranks; return pairs (case, answer)."""
    cases = [draw_paper(rng, [rng.integers(1, 4) for _ in AXES]) for _ in range(4)]
    cases += [draw_paper(rng, rng.shuffled([2, 3, 4, 5])), draw_paper(rng, [16, 4, 2, 8])]
    return list(zip(cases, run(probes.on_paper, cases), strict=True))


def coord_of(degrees, rank) -> dict:
    return {a: int(p) for a, p in zip(AXES, numpy.unravel_index(rank, degrees), strict=True)}


def rank_at(degrees, coord: dict, **changes: int) -> int:
    """Return the rank at this coordinate, with these changes."""
    return int(numpy.ravel_multi_index(list({**coord, **changes}.values()), degrees))


@exercise(MESH, kind="numerics")
def test_a_rank_is_a_place_in_an_array_of_all_ranks(paper):
    for case, got in paper:
        degrees, here = case["degrees"], case["here"]
        what = f"a mesh of {degrees} ({' x '.join(AXES)})"
        assert got["sizes"] == [list(pair) for pair in zip(AXES, degrees, strict=True)], f"{what}: {got['sizes']}"
        assert got["world"] == math.prod(degrees), f"{what}: world {got['world']}"
        for rank, coordinate, back in zip([here, *case["ranks"]], got["coordinates"], got["ranks_back"], strict=True):
            want = coord_of(degrees, rank)
            assert coordinate == [list(pair) for pair in want.items()], (
                f"{what}: rank {rank} is at {coordinate}, expected {want}: tensor changes fastest, data slowest"
            )
            assert back == rank, f"{what}: the rank at {coordinate} is {rank}, got {back}"


@exercise(MESH, kind="numerics")
def test_unnamed_axes_keep_this_ranks_coordinates(paper):
    for case, got in paper:
        degrees, rank = case["degrees"], case["here"]
        coord, edges = coord_of(degrees, rank), [(a, p) for a, n in zip(AXES, degrees, strict=True) for p in (0, n - 1)]
        want = [rank_at(degrees, coord, **{axis: index}) for axis, index in edges]
        assert got["counterparts"] == want, (
            f"rank {rank} of {degrees}: the first and last rank along each axis in turn are {want}, got "
            f"{got['counterparts']}: of axes that are not named, this rank's own coordinates, and not 0"
        )


def brief(ranks: list[int] | None) -> str:
    """Format a group, or its first 12 ranks."""
    if ranks is None:
        return "no group"
    return str(ranks) if len(ranks) <= 12 else f"{str(ranks[:12])[:-1]}, … {len(ranks)} ranks]"


@exercise(MESH, kind="numerics")
def test_groups_on_paper(paper):
    for case, got in paper:
        for axes, size, groups, group in zip(case["axes"], got["size"], got["partition"], got["own"], strict=True):
            want = partition(case["degrees"], axes)
            what = f"a mesh of {case['degrees']}, groups along {axes or 'no axis'}"
            assert size == len(want[0]), f"{what}: their size is {len(want[0])}, got {size}"
            wrong = next((pair for pair in itertools.zip_longest(groups, want) if pair[0] != pair[1]), None)
            assert wrong is None, (
                f"{what}: got {brief(wrong[0])} where {brief(wrong[1])} is expected: a group is all ranks that agree "
                "in every axis but its own; ranks, and first ranks, ascend"
            )
            true = next(g for g in want if case["here"] in g)
            assert group == true, f"{what}: ranks() of rank {case['here']} is {brief(group)}, expected {brief(true)}"


@exercise(MESH, kind="numerics")
def test_neighbours_end_at_the_ends_unless_the_axis_is_a_ring(paper):
    for case, got in paper:
        degrees, coord = case["degrees"], coord_of(case["degrees"], case["here"])
        for (axis, offset, wrap), neighbour in zip(case["moves"], got["neighbours"], strict=True):
            n, index = degrees[AXES.index(axis)], coord[axis] + offset
            want = rank_at(degrees, coord, **{axis: index % n}) if wrap or 0 <= index < n else None
            assert neighbour == want, (
                f"rank {case['here']} of {degrees}, at {coord}: {offset:+} along {axis}, wrap={wrap}: expected {want},"
                f" got {neighbour}: with wrap both ends are neighbours, without it nobody is beyond an end"
            )


@exercise(MESH, kind="numerics")
def test_what_is_not_there_is_refused(run, rng):
    errors = run(probes.refused, [rng.integers(1, 3) for _ in AXES])
    for what, error in errors.items():
        want = "RuntimeError" if what.endswith("on paper") else "ValueError"
        assert error == want, f"{what}: expected {want}, got {error}"


@exercise(MESH, kind="numerics")
def test_error_for_wrong_degrees_suggests_fixes(run, rng):
    world = rng.choice([4, 6])
    degrees = [[1, 1, 1, 1], [world, 2, 1, 1], [1, 3, 1, 4], [2, 1, 1, 5], [1, 1, world + 1, 1]]
    degrees = [rng.shuffled(d) for d in degrees]
    for case, message in zip(degrees, run(probes.misfits, degrees, world=world)[0], strict=True):
        product = math.prod(case)
        name = message.partition(":")[0]
        assert name == ("nothing" if product == world else "ValueError"), f"{case} on {world} ranks raised {message}"
        if product == world:
            continue
        given = set(zip(AXES, case, strict=True))
        fixes = {(a, world * n // product) for a, n in given if world * n % product == 0}
        suggested = {(a, int(n)) for a, n in re.findall(r"([a-z]+)=(\d+)", message) if a in AXES}
        assert fixes <= suggested, (
            f"{case} on {world} ranks: {sorted(fixes)} would fit, changed alone, and the message does not say so: "
            f"{message!r}"
        )
        assert suggested <= fixes | given, (
            f"{case} on {world} ranks: {sorted(suggested - fixes - given)} does not fit: {message!r}"
        )


@pytest.fixture(params=["2 axes", "3 axes", "16 ranks"])
def ranks(request, run, rng):
    """Make a real mesh; return (degrees, lists of axes, each rank's values and messages)."""
    degrees = rng.shuffled({"2 axes": [1, 1, 2, 3], "3 axes": [1, 2, 2, 2], "16 ranks": [2, 2, 2, 2]}[request.param])
    several = rng.shuffled(SUBSETS[4:])[: 3 if len(set(degrees)) == 1 else 6]
    axes = [[a] for a in AXES] + [rng.shuffled(s) for s in several]
    return degrees, axes, traced(run, probes.groups, degrees, axes, world=math.prod(degrees), parts=["mesh", "sums"])


@exercise(MESH, kind="property")
def test_groups_partition_the_ranks_along_their_axes(ranks):
    degrees, axes, results = ranks
    for rank, got in enumerate(results):
        assert got["here"] == got["rank"] == rank, f"rank {rank} takes itself for {got['here']}"
        for names, total in zip(axes, got["sums"], strict=True):
            want = next(g for g in partition(degrees, names) if rank in g)
            reached = [r for r in range(math.prod(degrees)) if total >> r & 1]
            assert reached == want, (
                f"rank {rank} of {degrees}: its group along {names} reaches ranks {reached}, expected {want}"
            )
        sends(got["sent"]["mesh"], [], f"rank {rank}, to make groups")
        want = [[next(g for g in partition(degrees, names) if rank in g)] for names in axes]
        sends(got["sent"]["sums"], want, f"rank {rank} of {degrees}, groups along {axes}", fields=["group"])


@exercise(MESH, kind="property")
def test_a_group_is_made_once(ranks):
    degrees, axes, results = ranks
    unique = {tuple(a for a in AXES if a in names and degrees[AXES.index(a)] > 1) for names in axes}
    split = [axis for axis, n in zip(AXES, degrees, strict=True) if n > 1]
    for rank, got in enumerate(results):
        assert got["made"] >= len(split), (
            f"rank {rank} of {degrees}: {got['made']} groups exist when the mesh has been made, expected those of "
            f"{', '.join(split)}: members alone can ask for them later, and all ranks must make a group"
        )
        assert got["refused"] == ["ValueError"] * 2, (
            f"rank {rank}: group('model'), group('data', 'data'): raised {got['refused']}, expected ValueError of both"
        )
        forgotten = [names for names, same in zip(axes, got["again"], strict=True) if not same]
        assert not forgotten, (
            f"rank {rank}: group{tuple(forgotten[0])} and then group{tuple(forgotten[0][::-1])} are two groups, "
            "expected one: it is made once, and the order of axes does not matter"
        )
        measured("groups that a rank is put into", got["joined"], len(unique), at_most=True)
        assert got["joined"] <= len(unique), (
            f"rank {rank} of {degrees}: it was put into {got['joined']} groups for {len(axes)} that were asked for, of "
            f"which only {len(unique)} differ in ranks: an axis of degree 1 adds nobody, and a group costs connections"
        )
