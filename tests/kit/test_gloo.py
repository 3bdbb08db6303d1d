"""On plain Gloo, a stage's reference trains as it does on the switch: what is learnt there is true elsewhere.

A mesh goes on on another: the placements of the reference's own transformer are as true as the tests' own models'.
"""

import math

import pytest
import torch

from lab.course.assignment import ROOT
from lab.harness.rng import Rng
from tests.ddp import probes_wrappers as ddp
from tests.ddp.chains import draw_model as draw_data_parallel
from tests.mesh.compose import bare, draw_model
from tests.mesh.schedules import one_forward_one_backward
from tests.zero import probes_state as zero

from . import probes
from . import probes_checkpoint as mesh

IMPL = ROOT / "reference"
RNG = Rng("public", "gloo")


def on_both(runner, probe, *args, world: int) -> tuple[list, list]:
    gloo, switch = (runner.trace(probe, *args, world=world, folder={}, network=n) for n in ("gloo", "switch"))
    assert not any(trace.messages for trace in gloo), "they did not go over Gloo"
    assert all(trace.messages for trace in switch)
    return [trace.values for trace in gloo], [trace.values for trace in switch]


MOVES = {
    "experts, to shards": ({"experts": 4}, [{"expert": 2, "tensor": 2}, {}], [{"data": 4}, {"fsdp": True, "small": 0}]),
    "shards, to a pipe": (
        {"tied": True}, [{"data": 2, "tensor": 2}, {"fsdp": True, "small": 0}], [{"data": 2, "pipe": 2}, {}],
    ),
    "a pipe, to interleaved": (
        {"tied": True}, [{"pipe": 2, "tensor": 2}, {"sequence": True}],
        [{"data": 2, "tensor": 2}, {"schedule": "interleaved", "chunks": 2}],
    ),
}  # fmt: skip


def test_data_parallelism(runner):
    model, batches = draw_data_parallel(RNG, 3)
    args = "bucketed", {}, *model, batches, 0.1, True
    for gloo, switch in zip(*on_both(runner, ddp.steps, *args, world=3), strict=True):
        for name, value in switch["state"].items():
            torch.testing.assert_close(gloo["state"][name], value, rtol=1e-5, atol=1e-6)


def test_zero(runner):
    width, counts = 6, [2, 2]
    state = {n: RNG.normal(*t.shape) if t.is_floating_point() else t for n, t in zero.Model(width).state_dict().items()}
    state["layers.3.weight"] = state["layers.0.weight"]
    batches = [[RNG.normal(3, width) for _ in range(n)] for n in counts]
    stages = [[[0, 1], False], [[0, 1, 2], True]]
    args = width, "AdamW", {"lr": 0.1}, state, batches, stages
    for gloo, switch in zip(*on_both(runner, zero.resume, *args, world=3), strict=True):
        for ours, theirs in zip(gloo["stages"], switch["stages"], strict=True):
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


def test_a_pipeline_keeps_no_more_of_sixteen_micro_batches_than_of_four(runner):
    """Gloo's sends look incomplete until the code waits for them."""
    world, elements, grew = 4, 500_000, {}
    for micro_batches in (4, 16):
        args = one_forward_one_backward(world, micro_batches), micro_batches, elements
        traces = runner.trace(probes.pipelined, *args, world=world, network="gloo")
        assert traces[-1].values == pytest.approx(math.factorial(world + 1))
        grew[micro_batches] = [trace.peak_bytes for trace in traces]
    for rank, (few, many) in enumerate(zip(grew[4], grew[16], strict=True)):
        assert many - few < 4 * 4 * elements, f"rank {rank} of {world}, bytes by micro-batches and rank: {grew}"


@pytest.mark.parametrize("move", MOVES)
def test_the_reference_goes_on_on_another_mesh(runner, move):
    """4 ranks before and after; two steps, two more, against four at a stretch, on plain Gloo."""
    kind, before, after = MOVES[move]
    rng = Rng("public", move)
    model = draw_model(rng, 2, 2, **kind)
    state = {name: rng.normal(*t.shape) * 0.4 for name, t in bare(model).state_dict().items()}
    if model["tied"]:
        state["head.weight"] = state["embedding.weight"]
    tokens = [[rng.tokens(8, model["sizes"]["context"], vocabulary=10) for _ in range(2)] for _ in range(4)]
    stretch = runner.run(mesh.moved, model, state, [[*before, 4]], tokens, world=4, folder={}, network="gloo")
    moved = runner.run(mesh.moved, model, state, [[*before, 2], [*after, 2]], tokens, world=4, folder={})
    for rank in range(4):
        assert moved[rank] == pytest.approx(stretch[rank], rel=1e-5), f"rank {rank} of {move}"
