"""Experts that are sharded over tensor ranks.

Must hold: rows and all gradients are those of whole experts in one process. Each rank keeps 1/T of every expert.
Forward takes one all-reduce of the rows and backward another, for any number of experts.
Typical fakes: whole experts on every rank, and a slice of the result; one all-reduce per expert; weights gathered on
demand; no copy_to at the entrance, so that each rank returns only its summand of the rows' gradient; rows of one rank
alone; an expert without rows that is skipped, so that its gradient is None.
"""

import pytest

from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .carried import BOTH, check_sends
from .tensor_oracles import check_layer, check_share_kept, draw_state

EXPERT_TENSOR = "mesh.expert_tensor"


def draw(rng, size: int) -> tuple:
    """Draw sizes, state, rows and their gradients. One expert gets no rows."""
    numbers = [rng.integers(0, 4), rng.integers(5, 9), rng.integers(10, 20)][-rng.integers(2, 3) :]
    counts = rng.shuffled([0, *(rng.integers(1, 5) for _ in numbers[1:])])
    config = {"width": 2 * rng.integers(2, 4), "hidden": size * rng.integers(2, 4), "heads": 1, "kv_heads": 1}
    sizes = {"config": config, "numbers": numbers, "counts": counts}
    x, dy = (rng.normal(sum(counts), config["width"]) for _ in range(2))
    return sizes, draw_state(rng, "experts", sizes), x, dy


@exercise(EXPERT_TENSOR, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (2, True), (3, False)])
def test_the_parts_together_are_the_whole_experts(run, rng, expect, size, grouped):
    check_layer(run, rng, expect, "experts", draw(rng, size), size, grouped)


@exercise(EXPERT_TENSOR, kind="numerics")
def test_hidden_units_that_ranks_do_not_divide_are_refused(run, rng):
    sizes, *_ = draw(rng, 3)
    sizes["config"]["hidden"] += 1
    for (error,) in run(probes.refused, [["experts", sizes]], world=3):
        assert error.startswith("ValueError"), f"{sizes} on 3 ranks: expected ValueError, got {error}"


@exercise(EXPERT_TENSOR, kind="property")
def test_one_all_reduce_forward_and_one_backward_for_all_experts(run, rng, expect):
    drawn = sizes, _, x, _ = draw(rng, 2)
    ranks = check_layer(run, rng, expect, "experts", drawn, 2)
    check_sends(
        ranks, {part: [["all_reduce", x.numel(), "float32"]] for part in BOTH}, f"{len(sizes['numbers'])} experts, ",
        "experts share one entrance and one exit, and weights stay where they are", ("op", "elements", "dtype"),
    )  # fmt: skip


@exercise(EXPERT_TENSOR, kind="property")
def test_each_rank_keeps_its_share_of_each_expert(run, rng, replaced):
    share, width, numbers = rng.integers(700, 730), 512, [0, 3, 4]
    sizes, small = (
        {"config": {"width": width, "hidden": 4 * n, "heads": 1, "kv_heads": 1}, "numbers": numbers, "counts": []}
        for n in (share, 1)
    )
    layers = {"gate_proj": [share, width], "up_proj": [share, width], "down_proj": [width, share]}
    shapes = {f"{n}.{name}.weight": shape for n in numbers for name, shape in layers.items()}
    check_share_kept(run, "experts", sizes, small, shapes, hoarding=bool(replaced()))
