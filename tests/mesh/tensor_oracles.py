"""Draws layers for tensor parallelism, and compares the ranks' parts with the whole layer in one process."""

import math

import torch

from lab.harness import layouts
from lab.harness.judge import close, never_holds
from lab.harness.trace import sends

from . import probes_tensor as probes
from .carried import BOTH, TWICE, asked
from .compose import drawn_like
from .probes_placed import part_of


def draw_groups(rng, size: int, grouped: bool = True) -> tuple[int, list]:
    """Draw (world, groups): two groups of `size` ranks, in which a rank of the group differs from the global rank."""
    order = rng.shuffled(range(2 * size))
    return (2 * size, [sorted(order[:size]), sorted(order[size:])]) if grouped else (size, [])


def seats(world: int, groups: list) -> list[tuple[int, int, list]]:
    """(rank, place in its group, the group) of all ranks, group by group; group [] is the group of all ranks."""
    return [(rank, place, group) for group in groups or [[*range(world)]] for place, rank in enumerate(group)]


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
    return drawn_like(rng, probes.whole(kind, sizes)[0].state_dict(), 0.3)


def draw_block(rng, kind: str, size: int) -> tuple:
    """Draw sizes, state, x and dy of a block, or of its mlp or attention."""
    sizes = draw_sizes(rng, size)
    shape = (rng.integers(1, 2), sizes["context"], sizes["width"])
    return sizes, draw_state(rng, kind, sizes), rng.normal(*shape), rng.normal(*shape)


def whole_layer(kind: str, sizes: dict, state: dict, x: torch.Tensor, dy: torch.Tensor, dtype: str) -> dict:
    """Run the layer forward and backward in one process."""
    layer, around = probes.whole(kind, sizes)
    layer.to(getattr(torch, dtype)).load_state_dict(state)
    if x.is_floating_point():
        x = x.to(getattr(torch, dtype)).requires_grad_()
    y = layer(x, *(t.to(getattr(torch, dtype)) if isinstance(t, torch.Tensor) else t for t in around))
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "gradients": {n: p.grad for n, p in layer.named_parameters()}}


def layer_is_as_whole(run, rng, expect, kind: str, drawn: tuple, size: int, grouped: bool = False,
                      sequence: bool = False, needs: list | None = None) -> list:  # fmt: skip
    """Assert that the parts of a layer on all ranks give y, dx and all gradients of the whole one, in drawn layouts.

    drawn: sizes, state, x, dy. Returns each rank's values with its messages: "forward", "backward" and "finish".
    """
    (sizes, state, x, dy), (world, groups) = drawn, draw_groups(rng, size, grouped)
    place = {rank: place for rank, place, _ in seats(world, groups)}
    cut = {"x": 1, "y": 1} if sequence else {"column": {"y": -1}, "row": {"x": -1}}.get(kind, {})

    def own(name: str, rank: int, *wholes: torch.Tensor) -> list:
        """The rank's part of tensors that are cut as x is, or y."""
        return [t.chunk(size, cut[name])[place[rank]] if name in cut else t for t in wholes]

    given = [[own(name, r, t)[0] for r in range(world)] for name, t in (("x", x), ("y", dy))]
    lie = layouts.draw(rng, x=x, dy=dy)[1]
    ranks = asked(
        run, probes.part, kind, sizes, state, *given, groups, lie, sequence, world=world, replace=needs or [],
        parts=(*TWICE, "finish"),
    )  # fmt: skip
    want, plain = (expect(whole_layer, kind, sizes, state, x, dy, dtype) for dtype in ("float64", "float32"))
    prefix = {"column": "up.", "row": "down.", "embedding": "embedding."}.get(kind, "")  # which `part_of` knows
    for rank, got in enumerate(ranks):  # first, since one wrong part makes the sums of all ranks wrong
        has_its_part(got["parameters"], state, f"{kind}, rank {rank} of the world", place[rank], size, prefix)
    for rank, got in enumerate(ranks):
        what = f"{kind}, place {place[rank]} of {size}, in memory: {layouts.told(lie)}"
        assert not got["unused"], f"{what}: the given {got['unused']} is never called in forward"
        for name, like in (("y", "y"), ("dx", "x")):
            if want[name] is not None:
                close(
                    got[name], *own(like, rank, want[name], plain[name]), f"{what}, {name}", factor=10,
                    cause=CAUSES.get(kind) or CAUSES[name],
                )  # fmt: skip
        same_gradients(got["gradients"], want["gradients"], plain["gradients"], what, place[rank], size, prefix)
    return ranks


CAUSES = {
    "y": "is each summand there once?",
    "dx": "the ranks' gradients of an input that they share must be summed, once",
    "column": "outputs are cut, so the weight's dim 0 is; x is whole, and its gradient is summed over ranks",
    "row": "inputs are cut, so the weight's dim 1 is; the bias is added once, after the sum",
    "embedding": "a row is found on one rank, at the token less the rank's first; the others add zeros",
}


def has_its_part(have: dict, state: dict, what: str, place: int, size: int, prefix: str) -> None:
    """Assert that a rank's parameters have the shape of its part, and are not another rank's."""
    for name in have.keys() & state.keys():
        whole = state[name]
        parts = [part_of(prefix + name, whole, i, size) for i in range(size)]
        assert have[name].shape == parts[place].shape, (
            f"{what}: {name} has shape {tuple(have[name].shape)}, expected {tuple(parts[place].shape)}, its part of "
            f"{tuple(whole.shape)}"
        )
        alike = [i for i, part in enumerate(parts) if torch.equal(have[name], part)]
        assert place in alike or not alike, (
            f"{what}: its {name} is part {alike[0]} of {size}, expected part {place}: the place is the rank in the "
            "group, not in the world"
        )


def same_gradients(got: dict, want: dict, plain: dict, what: str, place: int, size: int, prefix: str = "") -> None:
    """Assert that each parameter has its part of the whole gradient."""
    assert sorted(got) == sorted(want), f"{what}: parameters {sorted(got)}, expected {sorted(want)}"
    for name in want:
        mine, yardstick = (part_of(prefix + name, of[name], place, size) for of in (want, plain))
        cause = "every rank's norms see their own tokens alone: sum" if "norm" in name else "the part of this rank"
        if mine.numel():
            assert got[name] is not None, f"{what}: {name} has no gradient"
            close(got[name], mine, yardstick, f"{what}, gradient of {name}", factor=20, dims="row, column", cause=cause)


def keeps_its_share(run, kind: str, sizes: dict, small: dict, shapes: dict, needs: list, hoarding=False) -> None:
    """Assert that each of four ranks has parameters of these shapes, all ones, and does not hold the whole layer.

    sizes, small: of a large and a tiny layer. The kernel measures memory. hoarding: a stand-in takes part, and
    stand-ins hold whole layers.
    """
    own = 4 * sum(math.prod(shape) for shape in shapes.values())
    ballast = 12 * own  # the whole is there three times while it is cut
    (little, *_), traces = (
        run.trace(probes.kept, kind, *given, world=4, replace=needs) for given in ((small, 1 << 12), (sizes, ballast))
    )
    for rank, trace in enumerate(traces):
        who, got = f"{kind}, rank {rank} of 4", trace.values
        assert got["parameters"] == shapes, f"{who}: parameters {got['parameters']}, expected {shapes}"
        other = {name: total for name, total in got["sums"].items() if total != math.prod(shapes[name])}
        assert not other, f"{who}: the whole layer is of ones, and these sums are not those of its parts: {other}"
        what = f"{who}: the other ranks' parts, which a view keeps alive (.contiguous() may be one: clone the part),"
        if not hoarding:
            never_holds(trace, little, what, 3 * own, ballast + own)


# ---- the four functions at which a region begins and ends ----

WAYS = {  # forward and backward
    "copy_to": ("same", "sum"),
    "reduce_from": ("sum", "same"),
    "gather_sequence": ("gather", "scatter"),
    "scatter_sequence": ("scatter", "gather"),
}
MOVES = {  # the operation, its result in words, and the result of the rank at this place of a group
    "same": ("", "what came in", lambda tensors, place: tensors[place]),
    "sum": ("all_reduce", "the sum over the group", lambda tensors, _: sum(tensors)),
    "gather": ("all_gather", "all ranks' tokens, in the order of the ranks", lambda tensors, _: torch.cat(tensors, 1)),
    "scatter": ("reduce_scatter", "the sum over ranks, of this rank's tokens",
                lambda tensors, place: sum(tensors).chunk(len(tensors), 1)[place]),
}  # fmt: skip


def conjugate_is_right(run, rng, name: str, size: int, grouped: bool = False, dtype=torch.float32) -> list:
    """Judge both directions in all layouts; return (rank, its group, a part's elements, each case's values and
    messages). Batch and context differ, and the ranks divide both."""
    world, groups = draw_groups(rng, size, grouped)
    batch, tokens, width = size * rng.integers(1, 2), rng.integers(3, 4), rng.integers(2, 3)
    drawn = [
        [rng.normal(batch, tokens * (size if way == "scatter" else 1), width).to(dtype) for _ in range(world)]
        for way in WAYS[name]
    ]
    cases = layouts.every(rng, dy=drawn[1], x=drawn[0])
    ranks = asked(run, probes.conjugate, name, cases, groups, world=world)
    for rank, place, group in seats(world, groups):
        for (given, lie), got in zip(cases, ranks[rank], strict=True):
            for way, came, went in zip(WAYS[name], ("x", "dy"), ("y", "dx"), strict=True):
                tensors, (_, words, moved) = [given[came][r] for r in group], MOVES[way]
                close(
                    got[went], moved([t.double() for t in tensors], place), moved(tensors, place),
                    f"{name}, {went} of rank {rank} of {group}, in memory: {layouts.told(lie)}", factor=4,
                    dims="batch, token, width", cause=f"expected {words}",
                )  # fmt: skip
    return [(rank, group, batch * tokens * width, ranks[rank]) for rank, _, group in seats(world, groups)]


def conjugate_sends_once(run, rng, name: str, size: int, grouped: bool = False, dtype=torch.float32) -> None:
    """Assert that each direction sends one message over the group in x's own dtype, and the identity none."""
    for rank, group, elements, cases in conjugate_is_right(run, rng, name, size, grouped, dtype):
        for got in cases:
            for way, part in zip(WAYS[name], BOTH, strict=True):
                operation, words, _ = MOVES[way]
                want = [[operation, elements, group, str(dtype).removeprefix("torch.")]] if operation else []
                sends(
                    got["sent"][part], want, f"{name}, rank {rank}, {part}", f"expected {words} in one message",
                    ("op", "elements", "group", "dtype"),
                )  # fmt: skip


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
