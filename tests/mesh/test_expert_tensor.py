"""Experts that are cut over ranks.

What must be true: rows, their gradients and those of the parts are those of whole experts in one process; each rank
keeps 1/T of every expert; one all-reduce of the rows forward and one backward, however many experts there are. How it
would be faked or got wrong: whole experts everywhere, and a share of the result; an all-reduce for each expert; weights
gathered when they are needed; the entrance forgotten, so that gradients of the rows are a summand; rows of one rank
alone; an expert that is given nothing left out, so that its gradient is None.
"""

from __future__ import annotations

import pytest
import torch

from lab.judge import close
from lab.model.transformer import Config, SwiGLU
from lab.pytest_plugin import exercise

from . import probes_expert_tensor as probes
from .suspects_sums import of_sum
from .tensor_oracles import draw_groups, members, messages, same_gradients

EXPERT_TENSOR = "mesh.expert_tensor"
NEEDS = ["mesh.conjugates", "mesh.parallel_linear"]


def draw(rng, size: int, of: int = 1) -> tuple:
    """sizes, numbers, state, and for each of `of` groups rows, gradients and counts, one expert without rows."""
    sizes = {"width": 2 * rng.integers(2, 4), "hidden": size * rng.integers(2, 4), "heads": 1, "kv_heads": 1}
    numbers = [rng.integers(0, 4), rng.integers(5, 9), rng.integers(10, 20)][-rng.integers(2, 3) :]
    shape = SwiGLU(Config(**sizes)).state_dict()
    state = {f"{n}.{name}": 0.5 * rng.normal(*t.shape) for n in numbers for name, t in shape.items()}
    shares = [0, *[rng.integers(1, 5) for _ in numbers[1:]]]
    counts = [rng.shuffled(shares) for _ in range(of)]
    x, dy = ([rng.normal(sum(c), sizes["width"]) for c in counts] for _ in range(2))
    return sizes, numbers, state, x, dy, counts


def oracle(sizes, numbers, state, x, dy, counts, dtype) -> dict:
    experts = torch.nn.ModuleDict({str(n): SwiGLU(Config(**sizes)) for n in numbers}).to(dtype)
    experts.load_state_dict(state)
    rows = x.to(dtype).requires_grad_()
    y = torch.cat([e(part) for e, part in zip(experts.values(), rows.split(counts), strict=True)])
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": rows.grad, "gradients": {n: p.grad for n, p in experts.named_parameters()}}


def summand(sizes, numbers, state, x, dy, counts, place: int, size: int) -> dict:
    """The "y" and the "dx" of one rank's hidden units alone."""
    share = sizes["hidden"] // size
    own = slice(place * share, (place + 1) * share)
    state = {name: value[:, own] if "down_proj" in name else value[own] for name, value in state.items()}
    return oracle({**sizes, "hidden": share}, numbers, state, x, dy, counts, torch.float64)


def are_cut(gradients: dict, state: dict, what: str, size: int) -> None:
    """Whoever computes whole experts has the right result, and gradients that count too often."""
    whole = [name for name, g in gradients.items() if size > 1 and g is not None and g.shape == state[name].shape]
    assert not whole, (
        f"{what}: {whole[0]} is whole here, {tuple(state[whole[0]].shape)}, and so are {len(whole)} of the "
        f"{len(gradients)} parameters: the experts are not cut. Keep the hidden units of this rank, 1/{size} of each"
    )


@exercise(EXPERT_TENSOR, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (2, True), (3, False)])
def test_the_parts_together_are_the_whole_experts(run, rng, size, grouped):
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    sizes, numbers, state, x, dy, counts = draw(rng, size, len(groups) or 1)
    ranks = run(probes.cut, sizes, numbers, state, x, dy, counts, groups, world=world, replace=NEEDS)
    all_groups = members(world, groups)
    parts = {
        rank: summand(sizes, numbers, state, x[i], dy[i], counts[i], place, size)
        for i, group in enumerate(all_groups)
        for place, rank in enumerate(group)
    }
    for i, group in enumerate(all_groups):
        args = sizes, numbers, state, x[i], dy[i], counts[i]
        want, plain = (oracle(*args, dtype) for dtype in (torch.float64, torch.float32))
        for place, rank in enumerate(group):
            what = f"rank {rank} of {group}, rows by expert {counts[i]}"
            are_cut(ranks[rank]["gradients"], state, what, size)
            for name, cause in (
                ("y", "the sum over ranks of what each rank's hidden units give"),
                ("dx", "each rank's part adds to the gradient of the rows: their sum, once"),
            ):
                each = [parts[r][name] for r in range(world)]
                close(
                    ranks[rank][name], want[name], plain[name], f"{what}, {name}", factor=10, cause=cause,
                    suspects=lambda each=each, group=group, rank=rank, name=name: of_sum(
                        each, rank, group, 1.0, {f"over all {world} ranks of the world": [*range(world)]}, name
                    ),
                )  # fmt: skip
            same_gradients(ranks[rank]["gradients"], want["gradients"], plain["gradients"], what, place, size)


@exercise(EXPERT_TENSOR, kind="numerics")
def test_hidden_units_that_ranks_do_not_divide_are_refused(run, rng):
    sizes = {"width": 4, "hidden": 3 * rng.integers(2, 4) + 1, "heads": 1, "kv_heads": 1}
    for told in run(probes.refused, sizes, world=3, replace=NEEDS):
        assert told == "ValueError", f"{sizes['hidden']} hidden units on 3 ranks: expected ValueError, got {told}"


@exercise(EXPERT_TENSOR, kind="property")
def test_one_all_reduce_forward_and_one_backward_for_all_experts(run, rng):
    sizes, numbers, state, x, dy, counts = draw(rng, 2)
    ranks = run(probes.cut, sizes, numbers, state, x, dy, counts, [], world=2, replace=NEEDS)
    for rank, got in enumerate(ranks):
        told = [messages(got["rows"], phase) for phase in ("forward", "backward")]
        want = [[["all_reduce", x[0].numel()]]] * 2
        assert told == want, (
            f"rank {rank}, {len(numbers)} experts: sent [forward, backward] {told}, expected {want}: experts share one "
            "entrance and one exit, and weights stay where they are"
        )


@exercise(EXPERT_TENSOR, kind="property")
def test_each_rank_keeps_its_share_of_each_expert(run, rng, replaced):
    world, width, numbers = rng.integers(2, 4), 2 * rng.integers(8, 12), [0, 3, 4]
    share = rng.integers(20, 30)
    sizes = {"width": width, "hidden": share * world, "heads": 1, "kv_heads": 1}
    layers = {"gate_proj": [share, width], "up_proj": [share, width], "down_proj": [width, share]}
    want = {f"{n}.{name}.weight": shape for n in numbers for name, shape in layers.items()}
    own = 4 * 3 * share * width * len(numbers)
    for rank, got in enumerate(run(probes.kept, sizes, numbers, world=world, replace=NEEDS)):
        who = f"rank {rank} of {world}"
        assert got["parameters"] == want, f"{who}: parameters {got['parameters']}, expected {want}"
        assert got["live_bytes"] <= 1.25 * own or replaced(NEEDS), (
            f"{who}: {got['live_bytes']} bytes are alive when the whole experts are gone, its own parts have {own}"
        )
