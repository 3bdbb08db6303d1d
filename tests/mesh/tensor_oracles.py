"""Draws layers for tensor parallelism, and compares the ranks' parts with the whole layer in one process."""

import math

import torch

from lab.harness import layouts
from lab.harness.judge import close, never_holds
from lab.harness.trace import sends

from . import probes_tensor as probes
from .carried import BOTH, TWICE, traced
from .compose import draw_like
from .probes_placed import part_of


def draw_groups(rng, size: int, grouped: bool = True) -> tuple[int, list]:
    """Draw (world, groups): two groups of `size` ranks, in which a rank of the group differs from the global rank."""
    order = rng.shuffled(range(2 * size))
    return (2 * size, [sorted(order[:size]), sorted(order[size:])]) if grouped else (size, [])


def memberships(world: int, groups: list) -> list[tuple[int, int, list]]:
    """Return (rank, index in its group, its group) of all ranks, group by group. groups: [] for one of all ranks."""
    return [(rank, index, group) for group in groups or [[*range(world)]] for index, rank in enumerate(group)]


def draw_sizes(rng, world: int) -> dict:
    """Draw different sizes of a transformer, divisible by `world`."""
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


# ---- layers ----


def draw_state(rng, kind: str, sizes: dict) -> dict:
    return draw_like(rng, probes.full_layer(kind, sizes)[0].state_dict(), 0.3)


def draw_block(rng, kind: str, size: int) -> tuple:
    """Draw sizes, state, x and dy of a block, or of its mlp or attention."""
    sizes = draw_sizes(rng, size)
    shape = (rng.integers(1, 2), sizes["context"], sizes["width"])
    return sizes, draw_state(rng, kind, sizes), rng.normal(*shape), rng.normal(*shape)


def run_layer(kind: str, sizes: dict, state: dict, x: torch.Tensor, dy: torch.Tensor, dtype: str) -> dict:
    """Run the layer forward and backward in one process."""
    layer, extras = probes.full_layer(kind, sizes)
    layer.to(getattr(torch, dtype)).load_state_dict(state)
    if x.is_floating_point():
        x = x.to(getattr(torch, dtype)).requires_grad_()
    y = layer(x, *(t.to(getattr(torch, dtype)) if isinstance(t, torch.Tensor) else t for t in extras))
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "gradients": {n: p.grad for n, p in layer.named_parameters()}}


def check_layer(run, rng, expect, kind: str, drawn: tuple, size: int, grouped=False, sequence=False) -> list:
    """Assert that the parts of a layer on all ranks give y, dx and all gradients of the whole one, in drawn layouts.

    drawn: sizes, state, x, dy. Returns each rank's values with its messages: "forward", "backward" and "finish".
    """
    (sizes, state, x, dy), (world, groups) = drawn, draw_groups(rng, size, grouped)
    index = {rank: index for rank, index, _ in memberships(world, groups)}
    cut = {"x": 1, "y": 1} if sequence else {"column": {"y": -1}, "row": {"x": -1}}.get(kind, {})

    def local_parts(name: str, rank: int, *tensors: torch.Tensor) -> list:
        """Return the rank's parts of tensors that are cut like x or y (`name`)."""
        return [t.chunk(size, cut[name])[index[rank]] if name in cut else t for t in tensors]

    inputs = [[local_parts(name, r, t)[0] for r in range(world)] for name, t in (("x", x), ("y", dy))]
    layout = layouts.draw(rng, x=x, dy=dy)[1]
    ranks = traced(
        run, probes.part, kind, sizes, state, *inputs, groups, layout, sequence, world=world, parts=(*TWICE, "finish"),
    )  # fmt: skip
    want, plain = (expect(run_layer, kind, sizes, state, x, dy, dtype) for dtype in ("float64", "float32"))
    prefix = {"column": "up.", "row": "down.", "embedding": "embedding."}.get(kind, "")  # names that `part_of` knows
    for rank, got in enumerate(ranks):  # first, since one wrong part makes the sums of all ranks wrong
        check_parts(got["parameters"], state, f"{kind}, rank {rank} of the world", index[rank], size, prefix)
    for rank, got in enumerate(ranks):
        what = f"{kind}, place {index[rank]} of {size}, in memory: {layouts.listed(layout)}"
        assert not got["unused"], f"{what}: the given {got['unused']} is never called in forward"
        for name, cut_like in (("y", "y"), ("dx", "x")):
            if want[name] is not None:
                close(
                    got[name], *local_parts(cut_like, rank, want[name], plain[name]), f"{what}, {name}", factor=10,
                    cause=CAUSES.get(kind) or CAUSES[name],
                )  # fmt: skip
        check_gradients(got["gradients"], want["gradients"], plain["gradients"], what, index[rank], size, prefix)
    return ranks


CAUSES = {
    "y": "is each summand there once?",
    "dx": "the ranks' gradients of an input that they share must be summed, once",
    "column": "outputs are cut, so the weight's dim 0 is; x is whole, and its gradient is summed over ranks",
    "row": "inputs are cut, so the weight's dim 1 is; the bias is added once, after the sum",
    "embedding": "a row is found on one rank, at the token less the rank's first; the others add zeros",
}


def check_parts(actual: dict, state: dict, what: str, index: int, size: int, prefix: str) -> None:
    """Assert that a rank's parameters have the shape of its part, and are not another rank's."""
    for name in actual.keys() & state.keys():
        full = state[name]
        parts = [part_of(prefix + name, full, i, size) for i in range(size)]
        assert actual[name].shape == parts[index].shape, (
            f"{what}: {name} has shape {tuple(actual[name].shape)}, expected {tuple(parts[index].shape)}, its part of "
            f"{tuple(full.shape)}"
        )
        matches = [i for i, part in enumerate(parts) if torch.equal(actual[name], part)]
        assert index in matches or not matches, (
            f"{what}: its {name} is part {matches[0]} of {size}, expected part {index}: the place is the rank in the "
            "group, not in the world"
        )


def check_gradients(got: dict, want: dict, plain: dict, what: str, index: int, size: int, prefix: str = "") -> None:
    """Assert that each parameter has its part of the whole gradient."""
    assert sorted(got) == sorted(want), f"{what}: parameters {sorted(got)}, expected {sorted(want)}"
    for name in want:
        true, yardstick = (part_of(prefix + name, gradients[name], index, size) for gradients in (want, plain))
        cause = "every rank's norms see their own tokens alone: sum" if "norm" in name else "the part of this rank"
        if true.numel():
            assert got[name] is not None, f"{what}: {name} has no gradient"
            close(got[name], true, yardstick, f"{what}, gradient of {name}", factor=20, dims="row, column", cause=cause)


def check_share_kept(run, kind: str, sizes: dict, small: dict, shapes: dict, hoarding=False) -> None:
    """Assert that each of four ranks has parameters of these shapes, all ones, and does not hold the whole layer.

    sizes, small: of a large and a tiny layer. The kernel measures memory. hoarding: skips that check, because a
    stand-in, which holds whole layers, takes part.
    """
    part_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    ballast = 12 * part_bytes  # three copies of the whole exist while it is cut
    (tiny, *_), traces = (
        run.trace(probes.weighed_part, kind, *args, world=4) for args in ((small, 1 << 12), (sizes, ballast))
    )
    for rank, trace in enumerate(traces):
        where, got = f"{kind}, rank {rank} of 4", trace.values
        assert got["parameters"] == shapes, f"{where}: parameters {got['parameters']}, expected {shapes}"
        wrong = {name: total for name, total in got["sums"].items() if total != math.prod(shapes[name])}
        assert not wrong, f"{where}: the whole layer is of ones, and these sums are not those of its parts: {wrong}"
        what = f"{where}: the other ranks' parts, which a view keeps alive (.contiguous() may be one: clone the part),"
        if not hoarding:
            never_holds(trace, tiny, what, 3 * part_bytes, ballast + part_bytes)


# ---- the four functions at which a region begins and ends ----

DIRECTIONS = {  # forward and backward
    "copy_to": ("same", "sum"),
    "reduce_from": ("sum", "same"),
    "gather_sequence": ("gather", "scatter"),
    "scatter_sequence": ("scatter", "gather"),
}
COLLECTIVES = {  # operation, its result in words, and a function: tensors of a group, index of a rank -> its result
    "same": ("", "what came in", lambda tensors, index: tensors[index]),
    "sum": ("all_reduce", "the sum over the group", lambda tensors, _: sum(tensors)),
    "gather": ("all_gather", "all ranks' tokens, in the order of the ranks", lambda tensors, _: torch.cat(tensors, 1)),
    "scatter": ("reduce_scatter", "the sum over ranks, of this rank's tokens",
                lambda tensors, index: sum(tensors).chunk(len(tensors), 1)[index]),
}  # fmt: skip


def check_conjugate(run, rng, name: str, size: int, grouped: bool = False, dtype=torch.float32) -> list:
    """Judge both directions in all layouts; return (rank, its group, a part's elements, each case's values and
    messages). Batch and context differ, and the ranks divide both."""
    world, groups = draw_groups(rng, size, grouped)
    batch, tokens, width = size * rng.integers(1, 2), rng.integers(3, 4), rng.integers(2, 3)
    drawn = [
        [rng.normal(batch, tokens * (size if collective == "scatter" else 1), width).to(dtype) for _ in range(world)]
        for collective in DIRECTIONS[name]
    ]
    cases = layouts.every(rng, dy=drawn[1], x=drawn[0])
    ranks = traced(run, probes.conjugate, name, cases, groups, world=world)
    for rank, index, group in memberships(world, groups):
        for (operands, layout), got in zip(cases, ranks[rank], strict=True):
            for collective, arg, out in zip(DIRECTIONS[name], ("x", "dy"), ("y", "dx"), strict=True):
                tensors, (_, words, apply) = [operands[arg][r] for r in group], COLLECTIVES[collective]
                close(
                    got[out], apply([t.double() for t in tensors], index), apply(tensors, index),
                    f"{name}, {out} of rank {rank} of {group}, in memory: {layouts.listed(layout)}", factor=4,
                    dims="batch, token, width", cause=f"expected {words}",
                )  # fmt: skip
    return [(rank, group, batch * tokens * width, ranks[rank]) for rank, _, group in memberships(world, groups)]


def check_one_message(run, rng, name: str, size: int, grouped: bool = False, dtype=torch.float32) -> None:
    """Assert that each direction sends one message over the group in x's own dtype, and the identity none."""
    for rank, group, elements, cases in check_conjugate(run, rng, name, size, grouped, dtype):
        for got in cases:
            for collective, part in zip(DIRECTIONS[name], BOTH, strict=True):
                operation, words, _ = COLLECTIVES[collective]
                want = [[operation, elements, group, str(dtype).removeprefix("torch.")]] if operation else []
                sends(
                    got["sent"][part], want, f"{name}, rank {rank}, {part}", f"expected {words} in one message",
                    ("op", "elements", "group", "dtype"),
                )  # fmt: skip


def check_nothing_kept(run, rng, name: str, factor: int) -> None:
    """Assert that one of the four functions keeps nothing for backward. factor: its sum of ones, per element."""
    elements = 2 * rng.integers(4_300_000, 4_400_000)
    (tiny, *_), traces = (
        run.trace(probes.kept_for_backward, name, *args, world=2) for args in ((2, 1 << 12), (elements, 40 * elements))
    )
    for rank, trace in enumerate(traces):
        where, total = f"{name}, rank {rank} of 2", factor * elements
        assert trace.values == total, f"{where}: of {elements} ones the sum has become {trace.values}, expected {total}"
        never_holds(
            trace, tiny, f"{where}: a tensor of x's size, kept for backward, which needs none,", 4 * elements,
            44 * elements,
        )  # fmt: skip
