"""Draws a model for a mesh, trains it there, and compares it with one process."""

from __future__ import annotations

import math

from lab.harness.diagnose import LOOKS
from lab.harness.judge import harmless

from . import probes_compose as probes
from .carried import asked
from .compose import (
    coordinate,
    draw_model,
    draw_run,
    members,
    same_as_alone,
)
from .probes_placed import stage_of

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
    try:
        same_as_alone(ranks, want, degrees, what)
    except AssertionError as error:
        alone = degrees.get("data", 1) == 1 < degrees.get("expert", 1)
        because = unsummed(run, rng, expect, degrees, plan, model, ranks) if alone else ""
        raise AssertionError(f"{error}{because}{misplaced(ranks, degrees, plan, model)}") from None
    return ranks


@harmless
def misplaced(ranks: list, degrees: dict, plan: dict, model: dict) -> str:
    """A line for a rank that has other blocks than its virtual stages."""
    stages, chunks, layers = degrees.get("pipe", 1), plan.get("chunks", 1), model["sizes"]["layers"]
    for rank, got in enumerate(ranks):
        place = coordinate(degrees, rank)["pipe"]
        names = [name.split(".") for name, *_ in got["gradients"]]
        has = sorted({int(rest[0]) for kind, *rest in names if kind == "blocks"})
        should = [b for b in range(layers) if stage_of(b, layers, stages * chunks) % stages == place]
        if has != should:
            return (
                f"\n{LOOKS}blocks on the wrong rank: rank {rank}, stage {place} of {stages} with {chunks} chunks, has "
                f"blocks {has} of {layers}, expected {should}: virtual stage c · pipe + p is chunk c of stage p"
            )
    return ""


@harmless
def unsummed(run, rng, expect, degrees: dict, plan: dict, model: dict, ranks: list) -> str:
    """Say so if with data = 1 no gradient was sent over expert."""
    statistics, group = 2 * model["experts"] + 1, list(members(degrees, 0, ("expert",)))
    rows = [row for row in ranks[0]["sent"]["step 0"] if row["op"] != "recv" and row["group"] == group]
    if any(row["op"] == "all_reduce" and row["elements"] > statistics for row in rows):
        return ""
    try:
        check(run, rng, expect, {**degrees, "data": 2}, plan, model, steps=1, rows=2)
        then = "; with data = 2 it is right"
    except AssertionError:
        then = ""
    return f"; with data = 1 no gradient was sent over expert, so none was summed or divided there{then}"
