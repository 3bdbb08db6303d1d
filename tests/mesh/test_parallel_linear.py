"""Column- and row-parallel linear layers, and the SwiGLU that is made of them.

What must be true: each rank keeps its share of the weight and no more, and the ranks together give what the whole layer
gives, forward and backward; a pair of layers costs one all-reduce forward and one backward. How it would be faked or
got wrong: whole weights and a slice of the result (the memory tells); a slice that is a view of the whole; the bias on
every rank before the sum; cut along the other dim (square weights would hide it, so none is square); an entrance for
each of two layers that share one input.
"""

from __future__ import annotations

import pytest
import torch

from lab.judge import close
from lab.pytest_plugin import exercise

from . import probes_tensor as probes
from .tensor_oracles import (
    block_is_as_whole,
    draw_groups,
    draw_sizes,
    draw_state,
    keeps_its_share,
    members,
    messages,
)

LINEAR = "mesh.parallel_linear"
NEEDS = ["mesh.conjugates"]


def draw(rng, kind: str, size: int, world: int, bias: bool) -> tuple:
    """weight, bias, and each rank's x and dy; ranks of any group may have other ones: places, not ranks, count."""
    rows, columns, tokens = size * rng.integers(2, 3), size * rng.integers(4, 5), (2, rng.integers(1, 3))
    weight = rng.normal(rows, columns)
    x, dy = rng.normal(*tokens, columns), rng.normal(*tokens, rows)
    return weight, rng.normal(rows) if bias else None, x, dy


def oracle(weight, bias, x, dy, dtype) -> dict:
    w, x, dy = (t.to(dtype) for t in (weight, x, dy))
    y = x @ w.T + (0 if bias is None else bias.to(dtype))
    flat_x, flat_dy = x.flatten(0, 1), dy.flatten(0, 1)
    return {"y": y, "dx": dy @ w, "weight": flat_dy.T @ flat_x, "bias": flat_dy.sum(0)}


@exercise(LINEAR, kind="numerics")
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(("world", "bias"), [(1, True), (2, False), (3, True), ("groups", True)])
def test_the_parts_together_are_the_whole_layer(run, rng, kind, world, bias):
    size = 2 if world == "groups" else world
    world, groups = draw_groups(rng, size) if world == "groups" else (world, [])
    weight, bias, x, dy = draw(rng, kind, size, world, bias)
    want, plain = (oracle(weight, bias, x, dy, dtype) for dtype in (torch.float64, torch.float32))
    cut_y, cut_x = (size, 1) if kind == "column" else (1, size)  # what is in parts: the outputs, or the inputs
    place = {rank: group.index(rank) for group in members(world, groups) for rank in group}
    given = [[t.chunk(cut, -1)[place[r] % cut] for r in range(world)] for t, cut in ((x, cut_x), (dy, cut_y))]
    parts = {"y": (-1, cut_y), "dx": (-1, cut_x), "weight": (0 if kind == "column" else 1, size), "bias": (0, cut_y)}
    told = run(probes.linear, kind, weight, bias, *given, groups, world=world, replace=NEEDS)
    for rank, got in enumerate(told):  # of all ranks first: one that has another part spoils the others' sums
        dim, have = parts["weight"][0], got["parameters"].get("weight")
        wrong = another_part(have, weight.chunk(size, dim), place[rank])
        assert wrong is None, (
            f"{kind}-parallel, rank {rank} of the world, place {place[rank]} of {size}: its weight is part {wrong} of "
            f"the whole's dim {dim}, expected part {place[rank]}"
            + (": the place is the rank in the group, not in the world" if wrong == rank % size else "")
        )
    for rank, got in enumerate(told):
        names = ["weight"] + ["bias"] * (bias is not None)
        what = f"{kind}-parallel, place {place[rank]} of {size}"
        assert sorted(got["gradients"]) == sorted(names), f"{what}: parameters {sorted(got['gradients'])}, not {names}"
        for name in ("y", "dx", *names):
            dim, cut = parts[name]
            mine = [t[name].chunk(cut, dim)[place[rank] % cut] for t in (want, plain)]
            have = got[name] if name in got else got["gradients"][name]
            close(
                have, *mine, f"{what}, {name if name in got else f'gradient of {name}'}", factor=10, cause=CAUSES[kind]
            )


def another_part(have: torch.Tensor | None, parts: tuple, place: int) -> int | None:
    """Which of the parts it is, where it is not that of this place."""
    if have is None:
        return None
    alike = [i for i, part in enumerate(parts) if torch.equal(have, part)]
    return alike[0] if alike and place not in alike else None


CAUSES = {
    "column": "outputs are cut, so the weight's dim 0 is; x is whole, and its gradient is summed over ranks",
    "row": "inputs are cut, so the weight's dim 1 is; the bias is added once, after the sum",
}


@exercise(LINEAR, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (3, False), (2, True)])
def test_swiglu_is_as_the_whole(run, rng, expect, size, grouped):
    block_is_as_whole(run, rng, expect, "mlp", size, grouped, needs=NEEDS)


@exercise(LINEAR, kind="numerics")
def test_what_ranks_do_not_divide_is_refused(run, rng):
    cases = [
        ["column", {"rows": 4, "columns": 6}],
        ["row", {"rows": 6, "columns": 4}],
        ["mlp", {**draw_sizes(rng, 3), "hidden": 7}],
        ["column", {"rows": 6, "columns": 4}],
    ]
    for (kind, sizes), told in zip(cases, run(probes.refused, cases, world=3, replace=NEEDS)[0], strict=True):
        want = "nothing" if sizes.get("rows") == 6 and kind == "column" else "ValueError"
        assert told == want, f"{kind} of {sizes} on 3 ranks: expected {want} to be raised, got {told}"


@exercise(LINEAR, kind="property")
@pytest.mark.parametrize("kind", ["column", "row", "mlp"])
def test_each_rank_keeps_its_share_of_the_weights(run, rng, kind):
    world = rng.integers(3, 4)
    if kind == "mlp":
        sizes = draw_sizes(rng, world)
        sizes |= {"hidden": 8 * world, "width": 4 * sizes["width"]}
        hidden, width = 8, sizes["width"]
        shapes = {"gate_proj.weight": [hidden, width], "up_proj.weight": [hidden, width],
                  "down_proj.weight": [width, hidden]}  # fmt: skip
    else:
        rows, columns = world * rng.integers(12, 16), world * rng.integers(17, 20)
        sizes = {"rows": rows, "columns": columns}
        cut = (rows // world, columns) if kind == "column" else (rows, columns // world)
        shapes = {"weight": list(cut), "bias": [cut[0]]}
    keeps_its_share(run, kind, sizes, [shapes] * world, NEEDS)


@exercise(LINEAR, kind="property")
@pytest.mark.parametrize(("kind", "forward"), [("column", 0), ("row", 1)])
def test_a_column_sends_backward_and_a_row_forward(run, rng, kind, forward):
    weight, bias, x, dy = draw(rng, kind, 2, 2, True)
    given = [x.chunk(2, -1), dy] if kind == "row" else [[x, x], dy.chunk(2, -1)]
    given = [list(t) if isinstance(t, tuple | list) else [t, t] for t in given]
    size = (dy if kind == "row" else x).numel()
    for rank, got in enumerate(run(probes.linear, kind, weight, bias, *given, [], world=2, replace=NEEDS)):
        told = [messages(got["rows"], phase) for phase in ("", "backward")]
        want = [[["all_reduce", size]] * forward, [["all_reduce", size]] * (1 - forward)]
        assert told == want, f"{kind}-parallel, rank {rank}: sent [forward, backward] {told}, expected {want}"


@exercise(LINEAR, kind="property")
def test_an_mlp_is_one_all_reduce_forward_and_one_backward(run, rng):
    sizes = draw_sizes(rng, 2)
    x = rng.normal(2, sizes["context"], sizes["width"])
    args = ("mlp", sizes, draw_state(rng, sizes), x, x.flip(0), [])
    for rank, got in enumerate(run(probes.block, *args, world=2, replace=NEEDS)):
        for phase in ("forward", "backward"):
            told = messages(got["rows"], phase)
            assert told == [["all_reduce", x.numel()]], (
                f"rank {rank}, {phase}: sent {told}, expected one all_reduce of x's {x.numel()} elements: gate and up "
                "share one entrance"
            )
