"""FSDP along the data axis, combined with other axes.

Must hold: gradients are those of the mean over the whole batch, for any number of micro-batches. Dense ones are summed
over data × expert, those of experts over data, partial ones also over tensor, and all are divided by data · expert.
Reduce-scatters run over data. Once per step, the remaining 1/D is summed over the other axes.
Typical fakes: FSDP over data × expert, which mixes different experts; the whole gradient summed over expert before it
is sharded; an all-reduce after each micro-batch, which counts the first one twice; experts divided by data alone.
"""

import math

import pytest

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.model.transformer import Config, Transformer

from . import probes_fsdp as probes
from .carried import traced
from .compose import bare, coordinate, members, train

FSDP_AXIS = "mesh.fsdp_axis"
EXPERTS = ["head.weight", "norm.weight"]  # the second is partial, too
PARTIAL = ["norm.weight", "blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"]


def axes_of(name: str) -> tuple:
    """Return the axes over which this parameter's gradient is summed."""
    return ("data", *(() if name in EXPERTS else ("expert",)), *(("tensor",) if name in PARTIAL else ()))


def draw(rng, degrees: dict, micro_batches: int = 2) -> tuple:
    """Draw sizes, then a state and batches per rank. A parameter is equal along the axes that sum its gradient."""
    heads = rng.integers(1, 2)
    sizes = {"layers": 1, "width": 4 * heads, "heads": heads, "kv_heads": heads, "hidden": rng.integers(3, 5),
             "vocabulary": rng.integers(5, 8), "context": 3}  # fmt: skip
    plain, drawn, states = Transformer(Config(**sizes)).state_dict(), {}, []
    world = math.prod(degrees.values())
    for rank in range(world):
        for name, t in plain.items():
            drawn.setdefault((name, members(degrees, rank, axes_of(name))), rng.normal(*t.shape) * 0.5 + (t.dim() == 1))
        states.append({name: drawn[name, members(degrees, rank, axes_of(name))] for name in plain})
    shape = (2, sizes["context"])
    batches = [
        [[rng.tokens(*shape, vocabulary=sizes["vocabulary"]) for _ in range(2)] for _ in range(micro_batches)]
        for _ in range(world)
    ]
    return sizes, states, batches


def one_process(sizes: dict, states: list, batches: list, degrees: dict, dtype: str) -> list:
    """Compute each rank's gradients in one process, summed over the right axes."""
    local = [
        train(bare({"sizes": sizes}, state, dtype), [micro_batches])["gradients"][0]
        for state, micro_batches in zip(states, batches, strict=True)
    ]
    shares = degrees.get("data", 1) * degrees.get("expert", 1)
    return [
        {name: sum(local[r][name] for r in members(degrees, rank, axes_of(name))) / shares for name in local[rank]}
        for rank in range(len(local))
    ]


def judged(run, rng, expect, degrees: dict, small: int, micro_batches: int = 2, layers: list | None = None) -> tuple:
    """Judge gradients against the whole batch's; return a state per rank, and each rank's values and messages."""
    sizes, states, batches = draw(rng, degrees, micro_batches)
    ranks = traced(
        run, probes.sharded, sizes, states, degrees, batches, EXPERTS, PARTIAL, small, layers,
        world=len(states), parts=["micro-batches", "finish"],
    )  # fmt: skip
    want, plain = (expect(one_process, sizes, states, batches, degrees, dtype) for dtype in ("float64", "float32"))
    for rank, got in enumerate(ranks):
        where = f"rank {rank} at {coordinate(degrees, rank)}"
        for part, names in got["units"]:
            minimum = -(-sum(states[rank][name].numel() for name in names) // degrees.get("data", 1))
            assert part >= minimum, (
                f"{where}: of the unit of {', '.join(names)} it has {part} numbers, expected {minimum}: cut units over "
                "data alone"
            )
        for name, start, piece in got["gradients"]:
            true, yardstick = (t[rank][name].flatten()[start : start + len(piece)] for t in (want, plain))
            roles = " and ".join(role for role, group in (("experts", EXPERTS), ("partial", PARTIAL)) if name in group)
            close(
                piece, true, yardstick, f"{where}: gradient of {name}, in {roles or 'neither list'}, from {start}",
                factor=12, cause=f"the sum over {' × '.join(axes_of(name))}, divided by data · expert",
            )  # fmt: skip
    return states, ranks


@exercise(FSDP_AXIS, kind="numerics")
@pytest.mark.parametrize("degrees", [{"data": 3}, {"data": 2, "expert": 2}, {"expert": 2}, {"data": 2, "tensor": 2},
                                     {"data": 2, "expert": 2, "tensor": 2}], ids=str)  # fmt: skip
def test_gradients_are_those_of_the_whole_batch(run, rng, expect, degrees):
    small = rng.choice([0, 1000]) if "expert" not in degrees else 10  # 10: matrices are sharded, norms are not
    judged(run, rng, expect, degrees, 0 if len(degrees) == 1 else small)


@exercise(FSDP_AXIS, kind="property")
def test_large_float16_gradients_do_not_overflow(run, rng):
    large, small = 3e4, rng.choice([0, 1000])
    for rank, gradient in enumerate(run(probes.large, large, small, world=4)):
        because = "" if math.isfinite(gradient) else f": their sum, {4 * large:g}, overflows. Divide before it"
        assert gradient == large, f"rank {rank}: of 4 gradients of {large} in float16 the mean is {gradient}{because}"


@exercise(FSDP_AXIS, kind="property")
@pytest.mark.parametrize("degrees", [{"data": 2, "expert": 2}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("small", [0, 10])
def test_what_is_sent_over_which_axis(run, rng, expect, degrees, small):
    _, ranks = judged(run, rng, expect, degrees, small, micro_batches := rng.integers(2, 3))
    for rank, got in enumerate(ranks):
        before, after = got["sent"].values()
        data, where = list(members(degrees, rank, ("data",))), f"rank {rank} at {coordinate(degrees, rank)}"
        scattered = [row for row in before + after if row["op"] == "reduce_scatter"]
        assert [row["group"] for row in scattered] == [data] * len(scattered), f"{where}: reduce-scatters over {data}"
        units = got["units"]
        assert len(scattered) == micro_batches * len(units), (
            f"{where}: {len(scattered)} reduce-scatters, expected one for each of {len(units)} units and "
            f"{micro_batches} micro-batches"
        )
        early, late = (
            [row for row in rows if row["op"] == "all_reduce" and len(row["group"]) > 1] for rows in (before, after)
        )
        assert not early, (
            f"{where}: {len(early)} all-reduces before finish_gradient_synchronization(). Expected one of each unit, "
            "in it, of the part that the reduce-scatter left"
        )
        remaining = [(names[0], part) for part, names in units] + got["whole"]
        sums = ([list(members(degrees, rank, axes_of(name)[1:])), count * 4] for name, count in remaining)
        want = sorted(each for each in sums if len(each[0]) > 1)
        found = sorted([row["group"], row["bytes"]] for row in late if row["group"] != data)
        assert found == want, (
            f"{where}, small={small}: all-reduces beyond data (group, bytes) {found}, expected {want}: once a step one "
            "for the part of each unit that is left, and one for each parameter that stays whole, over all other axes "
            "whose ranks had a share of its gradient"
        )


@exercise(FSDP_AXIS, kind="property")
def test_layers_are_cut_unless_they_are_small(run, rng, expect):
    layers = rng.shuffled(["embedding", "blocks.0.mlp", "norm"])
    states, ranks = judged(run, rng, expect, {"data": 2}, 10, layers=layers)
    for rank, got in enumerate(ranks):
        cut = {name for _, names in got["units"] for name in names}
        want = {n for n in states[0] if n.startswith(("embedding.", "blocks.0.mlp."))}
        assert cut == want, f"rank {rank}: with layers {layers} and small=10, {sorted(cut)} are cut, not {sorted(want)}"
        assert len(got["units"]) == 2, f"rank {rank}: {len(got['units'])} units of 2 layers that are not small"


@exercise(FSDP_AXIS, kind="property")
def test_a_layer_of_two_kinds_is_refused(run, rng):
    sizes, _, _ = draw(rng, {"data": 1})
    meshes, experts = [{"data": 2}, {"expert": 2}], ["blocks.0.mlp.up_proj.weight"]
    for errors in run(probes.refused, sizes, experts, meshes, world=2):
        refused = [error.startswith("ValueError: ") for error in errors]
        because = "axes of degree 1 count, too" if any(refused) else "kinds within a layer are to be compared"
        for degrees, error, fine in zip(meshes, errors, refused, strict=True):
            assert fine, (
                f"FSDPAxis on {degrees} with layers=[a block], one of whose weights is an expert's, raised {error}; "
                f"expected ValueError, since they are summed over different axes: {because}"
            )
