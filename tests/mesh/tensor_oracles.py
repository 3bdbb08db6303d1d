"""Draws layers for tensor parallelism, and compares the ranks' parts with the whole layer in one process."""

from __future__ import annotations

import math

import torch
from torch import nn

from lab.harness.judge import close, never_holds

from . import probes_tensor as probes
from .carried import TWICE, asked
from .compose import bare, draw_state
from .probes_placed import part_of


def draw_groups(rng, size: int) -> tuple[int, list]:
    """Draw (world, groups): two groups of `size` ranks, in which a rank of the group differs from the global rank."""
    order = rng.shuffled(range(2 * size))
    return 2 * size, [sorted(order[:size]), sorted(order[size:])]


def seats(world: int, groups: list) -> list[tuple[int, int, list]]:
    """(rank, its place in its group, the group) of all ranks, by groups; [] for the one group of all."""
    return [(rank, place, group) for group in groups or [[*range(world)]] for place, rank in enumerate(group)]


def draw_sizes(rng, world: int) -> dict:
    """Draw different sizes of a transformer that `world` ranks divide."""
    kv_heads = world * rng.integers(1, 2)
    heads = kv_heads * rng.integers(2, 3)
    return {
        "layers": 1,
        "width": 2 * heads * rng.integers(1, 2),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": world * rng.integers(2, 5),
        "vocabulary": world * rng.integers(3, 5) + rng.integers(0, world - 1),
        "context": world * rng.integers(2, 3),
    }


def whole_block(kind: str, sizes: dict, state: dict, x: torch.Tensor, dy: torch.Tensor, dtype: str) -> dict:
    """Run the block, or its mlp or attention, forward and backward in one process."""
    model = bare({"sizes": sizes}, state, dtype)
    block = model.blocks[0]
    part: nn.Module = {"mlp": block.mlp, "attention": block.attention}.get(kind, block)  # type: ignore[assignment]
    x = x.to(model.cos.dtype).requires_grad_()
    around = () if kind == "mlp" else (model.cos[: sizes["context"]], model.sin[: sizes["context"]])
    y = part(x, *around)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "gradients": {n: p.grad for n, p in part.named_parameters()}}


def block_is_as_whole(run, rng, expect, kind: str, size: int, grouped: bool = False, sequence: bool = False,
                      needs: list | None = None) -> tuple[dict, torch.Tensor, list]:  # fmt: skip
    """Assert that the parts of a block on all ranks give y, dx and all gradients of the whole block.

    Returns the sizes, x, and each rank's values with its messages: "forward", "backward" and "finish".
    """
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    sizes = draw_sizes(rng, size)
    state = draw_state(rng, {"sizes": sizes}, 0.3)
    shape = (rng.integers(1, 2), sizes["context"], sizes["width"])
    x, dy = rng.normal(*shape), rng.normal(*shape)
    ranks = asked(
        run, probes.block, kind, sizes, state, x, dy, groups, sequence, world=world, replace=needs or [],
        parts=(*TWICE, "finish"),
    )  # fmt: skip
    want = expect(whole_block, kind, sizes, state, x, dy, "float64")
    plain = expect(whole_block, kind, sizes, state, x, dy, "float32")
    for rank, place, group in seats(world, groups):
        what = f"{kind}, rank {rank} of {group}"
        for name in ("y", "dx"):
            mine = [t[name].chunk(size, 1)[place] if sequence else t[name] for t in (want, plain)]
            close(
                ranks[rank][name], *mine, f"{what}, {name}", factor=10, dims="batch, token, width",
                cause=CAUSES[name],
            )  # fmt: skip
        same_gradients(ranks[rank]["gradients"], want["gradients"], plain["gradients"], what, place, size)
    return sizes, x, ranks


CAUSES = {
    "y": "is each summand there once?",
    "dx": "the ranks' gradients of an input that they share must be summed, once",
}


def same_gradients(got: dict, want: dict, plain: dict, what: str, place: int, world: int) -> None:
    """Assert that each parameter has its part of the whole gradient."""
    assert sorted(got) == sorted(want), f"{what}: parameters {sorted(got)}, expected {sorted(want)}"
    for name in want:
        mine, yardstick = part_of(name, want[name], place, world), part_of(name, plain[name], place, world)
        cause = "every rank's norms see their own tokens alone: sum" if "norm" in name else "the part of this rank"
        if mine.numel():
            assert got[name] is not None, f"{what}: {name} has no gradient"
            close(got[name], mine, yardstick, f"{what}, gradient of {name}", factor=20, dims="row, column", cause=cause)


def keeps_its_share(run, probe, args: list, small: list, shapes: dict, needs: list, hoarding: bool = False) -> None:
    """Assert that each of four ranks has parameters of these shapes, all ones, and does not hold the whole layer.

    args, small: the probe's arguments for a large and a tiny layer. The kernel measures memory. hoarding: a stand-in
    takes part, and stand-ins hold whole layers.
    """
    own = 4 * sum(math.prod(shape) for shape in shapes.values())
    ballast = 12 * own  # the whole is there three times while it is cut
    (little, *_), traces = (
        run.trace(probe, *given, world=4, replace=needs) for given in ([*small, 1 << 12], [*args, ballast])
    )
    for rank, trace in enumerate(traces):
        who, got = f"{args[0]}, rank {rank} of 4", trace.values
        assert got["parameters"] == shapes, f"{who}: parameters {got['parameters']}, expected {shapes}"
        other = {name: total for name, total in got["sums"].items() if total != math.prod(shapes[name])}
        assert not other, f"{who}: the whole layer is of ones, and these sums are not those of its parts: {other}"
        what = f"{who}: the other ranks' parts, which a view keeps alive (.contiguous() may be one: clone the part),"
        if not hoarding:
            never_holds(trace, little, what, 3 * own, ballast + own)


def keeps_nothing(run, rng, name: str, times: int) -> None:
    """Assert that one of the four functions keeps nothing for backward. times: the factor of a sum of ones."""
    elements = 2 * rng.integers(4_300_000, 4_400_000)
    (little, *_), traces = (
        run.trace(probes.kept_for_backward, name, *given, world=2)
        for given in ((2, 1 << 12), (elements, 40 * elements))
    )
    for rank, trace in enumerate(traces):
        who, total = f"{name}, rank {rank} of 2", times * elements
        assert trace.values == total, f"{who}: of {elements} ones the sum has become {trace.values}, expected {total}"
        never_holds(
            trace, little, f"{who}: a tensor of x's size, kept for backward, which needs none,", 4 * elements,
            44 * elements,
        )  # fmt: skip
