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

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.model.transformer import Config, SwiGLU

from . import probes_expert_tensor as probes
from .carried import BOTH, asked, messages
from .tensor_oracles import draw_groups, keeps_its_share, same_gradients

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


def are_cut(gradients: dict, state: dict, what: str, size: int) -> None:
    """Assert that experts are cut: whole experts give the right result, but gradients that count too often."""
    whole = [name for name, g in gradients.items() if size > 1 and g is not None and g.shape == state[name].shape]
    assert not whole, (
        f"{what}: {whole[0]} is whole here, {tuple(state[whole[0]].shape)}, and so are {len(whole)} of the "
        f"{len(gradients)} parameters: the experts are not cut. Keep the hidden units of this rank, 1/{size} of each"
    )


def judged(run, rng, size: int, grouped: bool) -> tuple:
    """Judge results against whole experts'; return their numbers, each group's rows, all values and messages."""
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    sizes, numbers, state, x, dy, counts = draw(rng, size, len(groups) or 1)
    ranks = asked(run, probes.cut, sizes, numbers, state, x, dy, counts, groups, world=world, replace=NEEDS)
    for i, group in enumerate(groups or [[*range(size)]]):
        args = sizes, numbers, state, x[i], dy[i], counts[i]
        want, plain = (oracle(*args, dtype) for dtype in (torch.float64, torch.float32))
        for place, rank in enumerate(group):
            what = f"rank {rank} of {group}, rows by expert {counts[i]}"
            are_cut(ranks[rank]["gradients"], state, what, size)
            for name, cause in (
                ("y", "the sum over ranks of what each rank's hidden units give"),
                ("dx", "each rank's part adds to the gradient of the rows: their sum, once"),
            ):
                close(ranks[rank][name], want[name], plain[name], f"{what}, {name}", factor=10, cause=cause)
            same_gradients(ranks[rank]["gradients"], want["gradients"], plain["gradients"], what, place, size)
    return numbers, x, ranks


@exercise(EXPERT_TENSOR, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (2, True), (3, False)])
def test_the_parts_together_are_the_whole_experts(run, rng, size, grouped):
    judged(run, rng, size, grouped)


@exercise(EXPERT_TENSOR, kind="numerics")
def test_hidden_units_that_ranks_do_not_divide_are_refused(run, rng):
    sizes = {"width": 4, "hidden": 3 * rng.integers(2, 4) + 1, "heads": 1, "kv_heads": 1}
    for told in run(probes.refused, sizes, world=3, replace=NEEDS):
        assert told == "ValueError", f"{sizes['hidden']} hidden units on 3 ranks: expected ValueError, got {told}"


@exercise(EXPERT_TENSOR, kind="property")
def test_one_all_reduce_forward_and_one_backward_for_all_experts(run, rng):
    numbers, x, ranks = judged(run, rng, 2, grouped=False)
    want = [[["all_reduce", x[0].numel()]]] * 2
    for rank, got in enumerate(ranks):
        told = [messages(got["sent"][part]) for part in BOTH]
        assert told == want, (
            f"rank {rank}, {len(numbers)} experts: sent [forward, backward] {told}, expected {want}: experts share one "
            "entrance and one exit, and weights stay where they are"
        )
        dtypes = {row["dtype"] for part in BOTH for row in got["sent"][part]}
        assert dtypes == {"float32"}, f"rank {rank}: sent {', '.join(dtypes)}, expected float32, the dtype of the rows"


@exercise(EXPERT_TENSOR, kind="property")
def test_each_rank_keeps_its_share_of_each_expert(run, rng, replaced):
    share, width, numbers = rng.integers(700, 730), 512, [0, 3, 4]
    sizes, small = ({"width": 512, "hidden": 4 * n, "heads": 1, "kv_heads": 1} for n in (share, 1))
    layers = {"gate_proj": [share, width], "up_proj": [share, width], "down_proj": [width, share]}
    shapes = {f"{n}.{name}.weight": shape for n in numbers for name, shape in layers.items()}
    keeps_its_share(
        run, probes.kept, ["experts", sizes, numbers], ["experts", small, numbers], shapes, NEEDS, bool(replaced(NEEDS))
    )  # fmt: skip
