"""Gradients of a layer of experts on data×expert ranks are those of one process.

Must hold: dense gradients are summed over all W replicas, those of experts over data. Both are divided by W.
Typical fakes: experts reduced over data×expert, which mixes different experts; dense gradients reduced over data only;
experts divided by the size of data; a rank that skips the collective of a gradient that is None; new tensors, which
optimizers and buckets do not hold.
"""

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_experts as probes
from .carried import traced
from .experts import draw_layer, one_process

REDUCE = "mesh.reduce_gradients"


def draw(rng, data: int, expert: int, dtype=torch.float32) -> list:
    """Draw gradients per rank, with the same shapes on all ranks. Some are not present, on all ranks."""
    shapes = {name: [[rng.integers(1, 4) for _ in range(rng.integers(1, 2))] for _ in range(3)]
              for name in ("dense", "experts")}  # fmt: skip
    present = {name: rng.shuffled([True, True, False]) for name in shapes}
    return [
        {name: [rng.normal(*s).clamp(-1, 1).to(dtype) for s in shapes[name]] for name in shapes}
        | {f"{name}_there": present[name] for name in shapes}
        for _ in range(data * expert)
    ]


def judged(run, cases: list, expert: int) -> list:
    """Judge over which ranks each gradient is summed; return each rank's values and messages."""
    world = len(cases)
    ranks = traced(run, probes.reduce, cases, expert, world=world, parts=["reduce"])
    for rank, got in enumerate(ranks):
        for name, members in (("dense", range(world)), ("experts", range(rank % expert, world, expert))):
            for i, present in enumerate(cases[rank][f"{name}_there"]):
                what = f"rank {rank} of {world}, expert={expert}, {name} gradient {i}"
                if not present:
                    assert got[name][i] is None, f"{what}: was None and is not now"
                    continue
                assert torch.isfinite(got[name][i]).all(), f"{what}: overflows: divide before the sum"
                parts = torch.stack([cases[r][name][i] for r in members])
                want, plain = parts.double().sum(0) / world, (parts / world).sum(0)
                close(
                    got[name][i], want, plain, what, factor=10,
                    cause=f"the sum over ranks {list(members)}, divided by {world}",
                )  # fmt: skip
    return ranks


@exercise(REDUCE, kind="numerics")
def test_dense_and_expert_gradients_sum_over_their_own_ranks(run, rng):
    data, expert = rng.choice([(2, 3), (3, 2)])  # unequal factors show which axis is forgotten
    judged(run, draw(rng, data, expert), expert)


@exercise(REDUCE, kind="numerics")
def test_16_bit_sums_do_not_overflow(run, rng):
    cases = draw(rng, 2, 2, torch.float16)
    for case in cases:
        for name in ("dense", "experts"):
            case[name] = [(g.float() * 5000 + 40000).half() for g in case[name]]
    judged(run, cases, 2)


@exercise(REDUCE, kind="numerics")
@pytest.mark.parametrize(("data", "expert"), [(1, 2), (2, 1), (2, 2)])
def test_a_layer_of_experts_learns_as_one_process_does(run, rng, expect, data, expert):
    """Its results and its balancing loss are those of one process, too."""
    sizes, state = draw_layer(rng, expert * rng.integers(1, 2) + (expert == 1))
    sizes["k"] = rng.integers(1, 2)
    tokens, world = rng.integers(3, 6), data * expert
    shares = [{"x": rng.normal(tokens, sizes["width"]), "weights": rng.normal(tokens, sizes["width"])}
              for _ in range(world)]  # fmt: skip
    want, plain = (expect(one_process, sizes, state, shares, dtype) for dtype in ("float64", "float32"))
    for rank, got in enumerate(run(probes.layer, sizes, state, shares, expert, world=world)):
        what = f"rank {rank}, data={data}, expert={expert}"
        close(got["y"], want["ranks"][rank]["y"], plain["ranks"][rank]["y"], f"{what}, result", factor=10)
        close(got["balance"], want["balance"], plain["balance"], f"{what}, balancing loss", factor=10)
        local_experts = len(state) // 3 // expert
        assert len(got["gradients"]) == 1 + 3 * local_experts, f"{what}: holds {sorted(got['gradients'])}"
        for name, gradient in got["gradients"].items():
            cause = "summed over data" if name.startswith("experts") else "summed over data×expert"
            close(
                gradient, want["gradients"][name], plain["gradients"][name], f"{what}, gradient of {name}", factor=15,
                cause=f"expected the gradient of the global mean loss: {cause}, divided by {world}",
            )  # fmt: skip


@exercise(REDUCE, kind="property")
def test_experts_are_never_sent_along_their_axis(run, rng):
    """Dense gradients go over all ranks and experts' gradients over data, in any number of messages."""
    cases = draw(rng, 2, 2)
    for rank, got in enumerate(judged(run, cases, 2)):
        assert got["in_place"], f"rank {rank}: a gradient is a new tensor: whoever kept a view of it has the old one"
        wanted = {"dense": [0, 1, 2, 3], "experts": [rank % 2, rank % 2 + 2]}
        for name, members in wanted.items():
            sent = [r for r in got["sent"]["reduce"] if r["group"] == members]
            ops = sorted({r["op"] for r in sent})
            elements = sum(r["elements"] for r in sent)
            want = sum(g.numel() for g, t in zip(cases[rank][name], cases[rank][f"{name}_there"], strict=True) if t)
            assert ops == ["all_reduce"] and elements == want, (  # noqa: PT018
                f"rank {rank} of data=2, expert=2: over ranks {members} issued {ops} of {elements} numbers, expected "
                f"all_reduce of the {want} of its {name} gradients, each once"
            )
        others = [(r["op"], r["group"]) for r in got["sent"]["reduce"] if r["group"] not in wanted.values()]
        assert not others, f"rank {rank}: also issued {others}"
