"""On plain Gloo, the references of ddp, zero and mesh train as they do on the switch."""

import math

import pytest
import torch

from lab.course.assignment import ROOT
from lab.harness.rng import Rng
from tests.ddp import probes_wrappers as ddp
from tests.ddp.chains import draw_model as draw_data_parallel
from tests.mesh import probes_compose as mesh
from tests.mesh.compose import bare, draw_model
from tests.mesh.schedules import one_forward_one_backward
from tests.zero import probes_state as zero

from . import probes

IMPL = ROOT / "reference"
RNG = Rng("public", "gloo")


def on_both(runner, probe, *args, world: int) -> tuple[list, list]:
    gloo, switch = (runner.trace(probe, *args, world=world, folder={}, network=n) for n in ("gloo", "switch"))
    assert not any(trace.messages for trace in gloo), "they did not go over Gloo"
    assert all(trace.messages for trace in switch)
    return [trace.values for trace in gloo], [trace.values for trace in switch]


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
        for got, want in zip(gloo["stages"], switch["stages"], strict=True):
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)


def test_pipeline_peak_memory_does_not_scale_with_micro_batches(runner):
    """Gloo's sends appear incomplete until the code waits for them."""
    world, elements, peaks = 4, 500_000, {}
    for micro_batches in (4, 16):
        args = one_forward_one_backward(world, micro_batches), micro_batches, elements
        traces = runner.trace(probes.pipelined, *args, world=world, network="gloo")
        assert traces[-1].values == pytest.approx(math.factorial(world + 1))
        peaks[micro_batches] = [trace.peak_bytes for trace in traces]
    for rank, (few, many) in enumerate(zip(peaks[4], peaks[16], strict=True)):
        assert many - few < 4 * 4 * elements, f"rank {rank} of {world}, bytes by micro-batches and rank: {peaks}"


def test_a_mesh(runner):
    """Covers messages between interleaved stages, and tokens between experts."""
    model = draw_model(RNG, layers=4, experts=4)
    state = {name: RNG.normal(*t.shape) * 0.4 for name, t in bare(model).state_dict().items()}
    batches = [[RNG.tokens(16, model["sizes"]["context"], vocabulary=5) for _ in range(2)] for _ in range(3)]
    plan = {"schedule": "interleaved", "micro_batches": 4, "chunks": 2}
    args = model, state, {"pipe": 2, "expert": 2}, plan, batches
    for gloo, switch in zip(*on_both(runner, mesh.trained, *args, world=4), strict=True):
        assert gloo["losses"] == pytest.approx(switch["losses"], rel=1e-5)
