"""Queries a mesh for ranks and groups: without torch.distributed for any world, and on real ranks."""

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from lab.harness.raising import raised
from lab.ranks import gates


def on_paper(impl, cases: list) -> list:
    """Query meshes without processes. case: degrees, here (rank), ranks, axes (lists), moves ([axis, offset, wrap])."""
    results = []
    for case in cases:
        mesh = impl.mesh.mesh.Mesh(*case["degrees"], rank=case["here"])
        ranks = [(), *((rank,) for rank in case["ranks"])]  # this one first
        results.append({
            "sizes": [[str(axis), int(n)] for axis, n in mesh.sizes.items()],
            "world": int(mesh.world),
            "coordinates": [_plain(mesh.coordinate(*rank)) for rank in ranks],
            "ranks_back": [int(mesh.rank(**mesh.coordinate(*rank))) for rank in ranks],
            "counterparts": [
                int(mesh.rank(**{axis: index})) for axis, n in mesh.sizes.items() for index in (0, n - 1)
            ],
            "size": [int(mesh.size(*axes)) for axes in case["axes"]],
            "partition": [[list(map(int, ranks)) for ranks in mesh.partition(*axes)] for axes in case["axes"]],
            "own": [list(map(int, mesh.ranks(*axes))) for axes in case["axes"]],
            "neighbours": [_number(mesh.neighbour(a, offset, wrap=wrap)) for a, offset, wrap in case["moves"]],
        })  # fmt: skip
    return results


def _plain(coordinate) -> list:
    return [[str(axis), int(index)] for axis, index in coordinate.items()]


def _number(rank) -> int | None:
    return None if rank is None else int(rank)


def refused(impl, degrees: list) -> dict:
    """Return the errors of a mesh without torch.distributed for axes and ranks that do not exist, by call."""
    make = impl.mesh.mesh.Mesh
    mesh = make(*degrees, rank=0)
    calls = {
        "a rank beyond the world": lambda: make(*degrees, rank=mesh.world),
        "rank=-1, a rank before the world": lambda: make(*degrees, rank=-1),
        "Mesh(data=-1, pipe=-1, rank=0), degrees below 1": lambda: make(data=-1, pipe=-1, rank=0),
        "coordinate(world), a rank beyond it": lambda: mesh.coordinate(mesh.world),
        "coordinate(-1), a rank before it": lambda: mesh.coordinate(-1),
        "rank(tensor=degree), a place beyond the axis": lambda: mesh.rank(tensor=degrees[3]),
        "rank(data=-1), a place before it": lambda: mesh.rank(data=-1),
        "rank(model=0), an axis that is not there": lambda: mesh.rank(model=0),
        "partition('model'), an axis that is not there": lambda: mesh.partition("model"),
        "partition('data', 'data'), an axis named twice": lambda: mesh.partition("data", "data"),
        "ranks('model'), an axis that is not there": lambda: mesh.ranks("model"),
        "size('data', 'data'), an axis named twice": lambda: mesh.size("data", "data"),
        "neighbour('model'), an axis that is not there": lambda: mesh.neighbour("model"),
        "group('data') on paper": lambda: mesh.group("data"),
    }
    return {what: raised(call) for what, call in calls.items()}


def misfits(impl, degrees: list) -> list:
    """Return the error of a mesh with each of these degrees in this world, as text."""
    return [raised(lambda case=case: impl.mesh.mesh.Mesh(*case), text=True) for case in degrees]


def groups(impl, degrees: list, axes: list) -> dict:
    """Sum 2**rank over each group, so that bits name its ranks; return also how many groups this rank belongs to."""
    before = len(c10d._world.pg_map)
    gates.mark("mesh")
    mesh = impl.mesh.mesh.Mesh(*degrees)
    new_groups = len(c10d._world.pg_map) - before
    gates.mark("sums")
    reused, sums = [], []
    for names in axes:
        group = mesh.group(*names)
        count = len(c10d._world.pg_map)
        reused.append(mesh.group(*reversed(names)) is group and len(c10d._world.pg_map) == count)
        total = torch.tensor([2**mesh.here])
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    return {
        "here": int(mesh.here),
        "rank": dist.get_rank(),
        "sums": sums,
        "again": reused,
        "made": new_groups,
        "joined": len(c10d._world.pg_map) - before,
        "refused": [raised(lambda names=names: mesh.group(*names)) for names in (["model"], ["data", "data"])],
    }
