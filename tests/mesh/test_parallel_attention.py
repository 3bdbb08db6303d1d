"""Attention split over ranks by heads.

Must hold: each rank has a share of the query heads, and the key and value heads that belong to them. Together the ranks
give the result of the whole attention. Each direction sends one all-reduce, so two for a whole block.
Typical fakes: whole projections and slices of heads (caught by memory); heads assigned in turns, so that queries meet
wrong keys; keys repeated by the wrong factor; one entrance each for q, k and v; a head cut in the middle where ranks do
not divide the heads.
"""

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .carried import BOTH, check_sends
from .tensor_oracles import check_layer, check_share_kept, draw_block, draw_sizes

ATTENTION = "mesh.parallel_attention"


@exercise(ATTENTION, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (2, False), (3, False), (2, True)])
def test_heads_of_all_ranks_match_the_unsplit_layer(run, rng, expect, size, grouped):
    drawn = draw_block(rng, "attention", size)
    for rank, got in enumerate(check_layer(run, rng, expect, "attention", drawn, size, grouped)):
        assert got["attended"], f"rank {rank}: the attention that was given has an `attend` of its own, never called"
        assert got["whole"], f"rank {rank}: `config` is not that of the whole layer"


@exercise(ATTENTION, kind="numerics")
def test_block_of_two_parallel_halves_matches_the_unsplit_block(run, rng, expect):
    size = rng.integers(2, 3)
    check_layer(run, rng, expect, "block", draw_block(rng, "block", size), size)


@exercise(ATTENTION, kind="numerics")
def test_heads_that_do_not_divide_are_refused(run, rng):
    """Three ranks divide six query heads, but neither two key heads nor four heads of both kinds."""
    base = draw_sizes(rng, 3)
    # At this width three ranks divide every projection, but in the middle of a head.
    cases = [
        ["attention", {**base, "heads": h, "kv_heads": k, "width": 6 * h}] for h, k in ((6, 2), (4, 4), (6, 3))
    ]  # fmt: skip
    for (_, sizes), error in zip(cases, run(probes.refused, cases, world=3)[0], strict=True):
        name, _, text = error.partition(":")
        want = "nothing" if sizes["kv_heads"] == 3 else "ValueError"
        what = f"{sizes['heads']} query and {sizes['kv_heads']} key heads on 3 ranks"
        assert name == want, f"{what}: expected {want}, raised {error}"
        named = want == "nothing" or all(str(sizes[n]) in text for n in ("heads", "kv_heads"))
        assert named, f"{what}: expected both numbers in the message, got {text!r}"


@exercise(ATTENTION, kind="property")
def test_each_rank_keeps_its_share_of_the_projections(run, rng):
    base = draw_sizes(rng, 4) | {"heads": 8, "kv_heads": 4, "vocabulary": 8}
    sizes, small = (base | {"width": 8 * dim} for dim in (256, 2))
    width, queries, keys = sizes["width"], 512, 256
    shapes = {"q_proj.weight": [queries, width], "k_proj.weight": [keys, width], "v_proj.weight": [keys, width],
              "o_proj.weight": [width, queries]}  # fmt: skip
    check_share_kept(run, "attention", sizes, small, shapes)


@exercise(ATTENTION, kind="property")
@pytest.mark.parametrize(("kind", "count"), [("attention", 1), ("block", 2)])
def test_one_all_reduce_a_half_block_and_direction(run, rng, expect, kind, count):
    drawn = _, _, x, _ = draw_block(rng, kind, 2)
    ranks = check_layer(run, rng, expect, kind, drawn, 2)
    measured(f"{kind}: all-reduces in forward", len(ranks[0]["sent"]["forward"]), count)
    check_sends(
        ranks, {part: [["all_reduce", x.numel()]] * count for part in BOTH}, f"{kind}, ",
        "q, k and v share one entrance, and only o has a sum to make",
    )  # fmt: skip
