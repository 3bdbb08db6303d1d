"""Clipping by the norm of a gradient that is spread over a mesh.

Must hold: on any mesh the norm counts each number of the whole model's gradient once. All ranks scale by one factor.
Typical fakes: the norm of this rank's numbers; a sum over all ranks, which counts copies along data, expert or tensor
once per rank, and a tied head twice; a sum along one axis; squares in float16; a different factor per rank, so that
copies drift apart; a rank without gradients that returns while the others wait.
"""

import math

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_norm as probes
from .carried import traced
from .placed import draw_layout, draw_values

NORM = "mesh.global_norm"
MESHES = {
    "none": {"degrees": {}},
    "data": {"degrees": {"data": 3}},
    "tensor": {"degrees": {"tensor": 2}},
    "tied pipe": {"degrees": {"pipe": 2}, "tied": True},
    "data × expert": {"degrees": {"data": 2, "expert": 2}, "experts": 2},
    "data × tensor, sharded": {"degrees": {"data": 2, "tensor": 2}, "small": 20},
    "data × expert, sharded": {"degrees": {"data": 2, "expert": 2}, "experts": 2, "small": 0},
    "all": {"degrees": {"data": 1, "pipe": 2, "expert": 2, "tensor": 2}, "experts": 2, "tied": True},
    "frozen last stage": {"degrees": {"pipe": 2, "tensor": 2}},  # its ranks have no gradients, but take part
}


def judged(run, layout: dict, gradients: dict, shares: list, what: str, silent: list = ()) -> list:
    """Judge the norm, and the gradients that are scaled by it; return each rank's values and messages.

    shares: the limits, as fractions of the norm. silent: ranks of the last of two stages, if they have no gradients.
    """
    present = {n: g for n, g in gradients.items() if not silent or n.startswith(("embedding", "blocks.0"))}
    norm = math.sqrt(math.fsum(float(x) ** 2 for g in present.values() for x in g.double().flatten()))
    limits, world = [share * norm for share in shares], math.prod(layout["degrees"].values())
    ranks = traced(
        run, probes.clipped, layout, gradients, limits, [*silent], world=world, parts=["clip"]
    )  # fmt: skip
    for rank, results in enumerate(ranks):
        for got, limit in zip(results, limits, strict=True):
            where = f"{what}, rank {rank}, max_norm {limit:.4g}"
            assert got["returned"] == "torch.float64 ()", f"{where}: returned {got['returned']}, expected float64, ()"
            assert abs(got["norm"] - norm) <= 1e-6 * norm, (
                f"{where}: the norm is {norm:.7g}, got {got['norm']:.7g}, {got['norm'] / norm:.4g} times as much: "
                "each number of the model's gradient counts once, on one rank of those that hold it, and is squared in "
                "float64"
            )
            scale = min(1.0, limit / norm)
            for name, before, after in zip(got["names"], got["before"], got["after"], strict=True):
                assert (before is None) == (after is None), f"{where}: {name} had a gradient, or none, and not now"
                if before is not None:
                    want = before.double() * scale
                    close(after, want, want.to(before.dtype), f"{where}, {name}", cause=f"times {scale:.4g}")
    return ranks


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize("where", MESHES)
def test_the_norm_is_the_whole_models_on_any_mesh(run, rng, where):
    layout = draw_layout(rng, **MESHES[where])
    gradients = draw_values(rng, layout)
    silent = [2, 3] if where == "frozen last stage" else []
    judged(run, layout, gradients, rng.shuffled([rng.uniform(0.1, 0.6), 1.5, math.inf]), where, silent)


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", 2e4), ("float16", 1e-4), ("float32", 1e25), ("float32", 1e-25)]
)
def test_squares_neither_overflow_nor_vanish(run, rng, dtype, scale):
    layout = draw_layout(rng, {"data": 2}, small=rng.choice([None, 0]))
    gradients = {n: (g.clamp(-3, 3) * scale).to(getattr(torch, dtype)) for n, g in draw_values(rng, layout).items()}
    judged(run, layout, gradients, [0.3], f"{dtype} of about {scale:g}")


@exercise(NORM, kind="numerics")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_changes_nothing_anywhere(run, rng, bad):
    layout = draw_layout(rng, {"pipe": 2})
    gradients = draw_values(rng, layout)
    gradients["norm.weight"][rng.integers(0, 5)] = bad
    for rank, (got,) in enumerate(run(probes.clipped, layout, gradients, [0.1], [], world=2)):
        assert not math.isfinite(got["norm"]), f"rank {rank}: a gradient holds {bad}, and the norm is {got['norm']}"
        for name, before, after in zip(got["names"], got["before"], got["after"], strict=True):
            assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0)), (
                f"rank {rank}: a gradient of the last stage holds {bad}, and {name} was changed"
            )


@exercise(NORM, kind="numerics")
def test_zeros_and_limits_that_are_not_above_0(run, rng):
    layout = draw_layout(rng, {"data": 2})
    gradients = {name: torch.zeros_like(g) for name, g in draw_values(rng, layout).items()}
    for got in run(probes.clipped, layout, gradients, [0.5], [], world=2):
        assert got[0]["norm"] == 0, f"the norm of zeros is {got[0]['norm']}"
        assert not any(bool(g.any()) for g in got[0]["after"]), "zeros have become something"
    limits = [0.0, -1.0, math.nan]
    for rank, errors in enumerate(run(probes.refused, layout, gradients, limits, world=2)):
        assert errors == ["ValueError"] * 3, f"rank {rank}: max_norm of {limits}: expected ValueError, got {errors}"


@exercise(NORM, kind="property")
def test_all_ranks_have_the_same_bits(run, rng):
    """Norm and scaled gradients are equal bit for bit, although ranks contribute different amounts."""
    layout = draw_layout(rng, {"data": 3, "tensor": 2}, small=rng.choice([None, 40]))
    ranks = judged(run, layout, draw_values(rng, layout), [rng.uniform(0.1, 0.6)], "data × tensor")
    for rank, ((got,), (first,)) in enumerate(zip(ranks, [ranks[0]] * 6, strict=True)):
        assert got["norm"] == first["norm"], f"rank {rank}: norm {got['norm']!r}, rank 0 {first['norm']!r}"
        if layout["small"] is None and rank % 2 == 0:  # the same tensor rank
            for name, a, b in zip(got["names"], got["after"], first["after"], strict=True):
                assert torch.equal(a, b), f"{name} differs on ranks 0 and {rank}, which hold copies of it"


@exercise(NORM, kind="property")
def test_one_number_is_sent_once(run, rng):
    layout = draw_layout(rng, {"pipe": 2, "tensor": 2}, small=rng.choice([None, 0]))
    ranks = judged(run, layout, draw_values(rng, layout), [0.5], "ranks 2 and 3 have no gradients", [2, 3])
    for rank, (got,) in enumerate(ranks):
        sent = [(row["op"], row["elements"], row["group"]) for row in got["sent"]["clip"]]
        assert sent == [("all_reduce", 1, [0, 1, 2, 3])], (
            f"rank {rank} sent {sent}, expected one all_reduce of 1 number over all ranks: sum your own squares first"
        )


@exercise(NORM, kind="property")
def test_global_norm_clips_in_place_without_host_reads(run, rng):
    layout = draw_layout(rng, {"data": 2})
    for rank, (got,) in enumerate(judged(run, layout, draw_values(rng, layout), [0.1], "data")):
        assert got["in_place"], f"rank {rank}: .grad is another tensor than before: scale it in place"
        assert not got["reads"], (
            f"rank {rank}: {', '.join(got['reads'])} was called: the host waits for the device. Choose the factor by "
            "torch.where and clamp, not by if"
        )
