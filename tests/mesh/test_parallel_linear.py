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

from lab.harness import layouts
from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .carried import BOTH, asked, messages
from .tensor_oracles import block_is_as_whole, draw_groups, draw_sizes, keeps_its_share, seats

LINEAR = "mesh.parallel_linear"
NEEDS = ["mesh.conjugates"]


def draw(rng, kind: str, size: int, world: int, bias: bool) -> tuple:
    """Draw weight, bias, x and dy of the whole layer."""
    rows, columns, tokens = size * rng.integers(2, 3), size * rng.integers(4, 5), (2, rng.integers(1, 3))
    weight = rng.normal(rows, columns)
    x, dy = rng.normal(*tokens, columns), rng.normal(*tokens, rows)
    return weight, rng.normal(rows) if bias else None, x, dy


def oracle(weight, bias, x, dy, dtype) -> dict:
    w, x, dy = (t.to(dtype) for t in (weight, x, dy))
    y = x @ w.T + (0 if bias is None else bias.to(dtype))
    flat_x, flat_dy = x.flatten(0, 1), dy.flatten(0, 1)
    return {"y": y, "dx": dy @ w, "weight": flat_dy.T @ flat_x, "bias": flat_dy.sum(0)}


def linear_is_as_whole(run, rng, kind: str, size: int, bias: bool, grouped: bool = False) -> tuple:
    """Judge the parts against the whole layer; return x, dy, and each rank's values and messages."""
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    weight, bias, x, dy = draw(rng, kind, size, world, bias)
    want, plain = (oracle(weight, bias, x, dy, dtype) for dtype in (torch.float64, torch.float32))
    cut_y, cut_x = (size, 1) if kind == "column" else (1, size)  # what is in parts: the outputs, or the inputs
    place = {rank: place for rank, place, _ in seats(world, groups)}
    given = [[t.chunk(cut, -1)[place[r] % cut] for r in range(world)] for t, cut in ((x, cut_x), (dy, cut_y))]
    parts = {"y": (-1, cut_y), "dx": (-1, cut_x), "weight": (0 if kind == "column" else 1, size), "bias": (0, cut_y)}
    lie = layouts.draw(rng, x=x, dy=dy)[1]
    told = asked(run, probes.linear, kind, weight, bias, *given, groups, lie, world=world, replace=NEEDS)
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
        what = f"{kind}-parallel, place {place[rank]} of {size}, in memory: {layouts.told(lie)}"
        assert sorted(got["gradients"]) == sorted(names), f"{what}: parameters {sorted(got['gradients'])}, not {names}"
        for name in ("y", "dx", *names):
            dim, cut = parts[name]
            mine = [t[name].chunk(cut, dim)[place[rank] % cut] for t in (want, plain)]
            have = got[name] if name in got else got["gradients"][name]
            close(
                have, *mine, f"{what}, {name if name in got else f'gradient of {name}'}", factor=10, cause=CAUSES[kind]
            )
    return x, dy, told


@exercise(LINEAR, kind="numerics")
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(("world", "bias"), [(1, True), (2, False), (3, True), ("groups", True)])
def test_the_parts_together_are_the_whole_layer(run, rng, kind, world, bias):
    linear_is_as_whole(run, rng, kind, 2 if world == "groups" else world, bias, grouped=world == "groups")


def another_part(have: torch.Tensor | None, parts: tuple, place: int) -> int | None:
    """The number of the part that a rank has instead of its own; None if it has its own."""
    if have is None:
        return None
    alike = [i for i, part in enumerate(parts) if torch.equal(have, part)]
    return alike[0] if alike and place not in alike else None


@exercise(LINEAR, kind="numerics")
def test_parts_keep_dtype_and_whether_they_are_trained(run):
    for rank, got in enumerate(run(probes.frozen, world=2, replace=NEEDS)):
        odd = {name: told for name, told in got.items() if told != ["torch.bfloat16", False]}
        assert not odd, f"rank {rank}: of a frozen layer in bfloat16, (dtype, requires_grad) of parts are {odd}"


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
    if kind == "mlp":
        like, hidden, width = draw_sizes(rng, 4) | {"heads": 8, "kv_heads": 4, "width": 1024}, 1310, 1024
        sizes, small = (like | {"hidden": 4 * n} for n in (hidden, 1))
        shapes = {"gate_proj.weight": [hidden, width], "up_proj.weight": [hidden, width],
                  "down_proj.weight": [width, hidden]}  # fmt: skip
    else:
        rows, columns = 4 * rng.integers(500, 520), 4 * rng.integers(2000, 2020)
        sizes, small = {"rows": rows, "columns": columns}, {"rows": 4, "columns": 4}
        cut = (rows // 4, columns) if kind == "column" else (rows, columns // 4)
        shapes = {"weight": list(cut), "bias": [cut[0]]}
    keeps_its_share(run, probes.kept, [kind, sizes], [kind, small], shapes, NEEDS)


@exercise(LINEAR, kind="property")
@pytest.mark.parametrize(("kind", "forward"), [("column", 0), ("row", 1)])
def test_a_column_sends_backward_and_a_row_forward(run, rng, kind, forward):
    x, dy, ranks = linear_is_as_whole(run, rng, kind, 2, bias=True)
    one = [["all_reduce", (dy if kind == "row" else x).numel()]]
    want = [one * forward, one * (1 - forward)]
    for rank, got in enumerate(ranks):
        told = [messages(got["sent"][part]) for part in BOTH]
        assert told == want, f"{kind}-parallel, rank {rank}: sent [forward, backward] {told}, expected {want}"


@exercise(LINEAR, kind="property")
def test_an_mlp_is_one_all_reduce_forward_and_one_backward(run, rng, expect):
    _, x, ranks = block_is_as_whole(run, rng, expect, "mlp", 2, needs=NEEDS)
    for rank, got in enumerate(ranks):
        for part in BOTH:
            told = messages(got["sent"][part])
            assert told == [["all_reduce", x.numel()]], (
                f"rank {rank}, {part}: sent {told}, expected one all_reduce of x's {x.numel()} elements: gate and up "
                "share one entrance"
            )
