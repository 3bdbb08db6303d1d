"""The reference's own transformer moves from mesh to mesh: its placements are as true as the tests' own models'."""

from __future__ import annotations

import pytest

from lab.course.assignment import ROOT
from lab.harness.rng import Rng
from tests.mesh.compose import bare, draw_model

from . import probes_checkpoint as probes

IMPL = ROOT / "reference"
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
    stretch = runner.run(probes.moved, model, state, [[*before, 4]], tokens, world=4, shared=True, network="gloo")
    moved = runner.run(probes.moved, model, state, [[*before, 2], [*after, 2]], tokens, world=4, shared=True)
    for rank in range(4):
        assert moved[rank] == pytest.approx(stretch[rank], rel=1e-5), f"rank {rank} of {move}"
