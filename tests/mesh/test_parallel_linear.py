"""Column- and row-parallel linear layers, and the SwiGLU that is made of them.

Must hold: each rank keeps only its share of the weight. Together the ranks give the result of the whole layer, forward
and backward. A pair of layers takes one all-reduce per direction.
Typical fakes: whole weights and a slice of the result (caught by memory); a slice that is a view of the whole; the bias
added on every rank before the sum; weights cut along the other dim (none is square, because that would hide it); one
entrance per layer for two layers that share an input.
"""

import pytest

from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .carried import check_sends
from .tensor_oracles import check_layer, check_share_kept, draw_block, draw_sizes, draw_state

LINEAR = "mesh.parallel_linear"


def draw(rng, kind: str, size: int, bias: bool = True) -> tuple:
    """Draw sizes, state, x and dy of a whole layer."""
    if kind == "mlp":
        return draw_block(rng, kind, size)
    sizes = {"rows": size * rng.integers(2, 3), "columns": size * rng.integers(4, 5), "bias": bias}
    tokens = [rng.integers(1, 3) for _ in range(rng.integers(1, 2))]
    x, dy = rng.normal(*tokens, sizes["columns"]), rng.normal(*tokens, sizes["rows"])
    return sizes, draw_state(rng, kind, sizes), x, dy


@exercise(LINEAR, kind="numerics")
@pytest.mark.parametrize("kind", ["column", "row", "mlp"])
@pytest.mark.parametrize(("world", "bias"), [(1, True), (2, False), (3, True), ("groups", True)])
def test_the_parts_together_are_the_whole_layer(run, rng, expect, kind, world, bias):
    size = 2 if world == "groups" else world
    check_layer(run, rng, expect, kind, draw(rng, kind, size, bias), size, world == "groups")


@exercise(LINEAR, kind="numerics")
def test_parts_keep_dtype_and_whether_they_are_trained(run):
    for rank, got in enumerate(run(probes.frozen, world=2)):
        odd = {name: traits for name, traits in got.items() if traits != ["torch.bfloat16", False]}
        assert not odd, f"rank {rank}: of a frozen layer in bfloat16, (dtype, requires_grad) of parts are {odd}"


@exercise(LINEAR, kind="numerics")
def test_what_ranks_do_not_divide_is_refused(run, rng):
    cases = [
        ["column", {"rows": 4, "columns": 6}],
        ["row", {"rows": 6, "columns": 4}],
        ["mlp", {**draw_sizes(rng, 3), "hidden": 7}],
        ["column", {"rows": 6, "columns": 4}],
    ]
    for (kind, sizes), error in zip(cases, run(probes.refused, cases, world=3)[0], strict=True):
        want = "nothing" if sizes.get("rows") == 6 and kind == "column" else "ValueError"
        assert error.startswith(want), f"{kind} of {sizes} on 3 ranks: expected {want} to be raised, got {error}"


@exercise(LINEAR, kind="property")
@pytest.mark.parametrize("kind", ["column", "row", "mlp"])
def test_each_rank_keeps_its_share_of_the_weights(run, rng, kind):
    if kind == "mlp":
        base, hidden, width = draw_sizes(rng, 4) | {"heads": 8, "kv_heads": 4, "width": 1024}, 1310, 1024
        sizes, small = (base | {"hidden": 4 * n} for n in (hidden, 1))
        shapes = {"gate_proj.weight": [hidden, width], "up_proj.weight": [hidden, width],
                  "down_proj.weight": [width, hidden]}  # fmt: skip
    else:
        rows, columns = 4 * rng.integers(500, 520), 4 * rng.integers(2000, 2020)
        sizes, small = {"rows": rows, "columns": columns}, {"rows": 4, "columns": 4}
        cut = (rows // 4, columns) if kind == "column" else (rows, columns // 4)
        shapes = {"weight": list(cut), "bias": [cut[0]]}
    check_share_kept(run, kind, sizes, small, shapes)


@exercise(LINEAR, kind="property")
@pytest.mark.parametrize(("kind", "forward", "backward"), [("column", 0, 1), ("row", 1, 0), ("mlp", 1, 1)])
def test_a_column_sends_backward_a_row_forward_and_an_mlp_both(run, rng, expect, kind, forward, backward):
    drawn = _, _, x, dy = draw(rng, kind, 2)
    one = [["all_reduce", (dy if kind == "row" else x).numel()]]
    ranks = check_layer(run, rng, expect, kind, drawn, 2)
    check_sends(
        ranks, {"forward": one * forward, "backward": one * backward}, f"{kind}, ", "gate and up share one entrance"
    )
