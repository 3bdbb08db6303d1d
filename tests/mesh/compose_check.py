"""Draws a model for a mesh, trains it there, and compares it with one process."""

from __future__ import annotations

import math

from . import probes_compose as probes
from .carried import asked
from .compose import draw_model, draw_run, same_as_alone

NEEDS = [
    "mesh.mesh", "mesh.conjugates", "mesh.parallel_linear", "mesh.parallel_attention", "mesh.vocab_parallel",
    "mesh.sequence_parallel", "mesh.schedule_gpipe", "mesh.schedule_1f1b", "mesh.schedule_interleaved", "mesh.execute",
    "mesh.route", "mesh.exchange", "mesh.dispatch", "mesh.combine", "mesh.capacity",
    "mesh.reduce_gradients",
    "mesh.attach", "mesh.fsdp_axis", "zero.fsdp_gather",
]  # fmt: skip


def model_for(rng, degrees: dict, plan: dict | None = None, tied: bool = False) -> dict:
    """Draw a model that the mesh divides; with an expert axis, a mixture of experts."""
    virtual = degrees.get("pipe", 1) * (plan or {}).get("chunks", 1)
    experts = degrees["expert"] * rng.integers(1, 2) if degrees.get("expert", 1) > 1 else 0
    return draw_model(
        rng, degrees.get("tensor", 1), virtual + rng.integers(0, 1), max(experts, 2 * bool(experts)), tied
    )


def check(run, rng, expect, degrees: dict, plan: dict, model: dict, steps: int = 5, rows: int = 1) -> list:
    """Judge losses and gradients against one process's; return each rank's values, and its messages by step."""
    world = math.prod(degrees.values())
    state, batches, want = draw_run(rng, expect, model, degrees, plan, steps, rows)
    assert "factor" not in model or want["dropped"], "the test drew a limit that nothing meets"
    ranks = asked(
        run, probes.trained, model, state, degrees, plan, batches, 0.1, world=world, replace=NEEDS,
        parts=[f"step {i}" for i in range(steps)],
    )  # fmt: skip
    what = " × ".join(f"{axis}={n}" for axis, n in degrees.items()) or "one rank"
    what += "".join(f", {option}" for option in ("sequence", "fsdp") if plan.get(option))
    same_as_alone(ranks, want, degrees, what)
    return ranks
