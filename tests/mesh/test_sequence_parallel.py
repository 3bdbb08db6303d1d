"""Sequence parallelism: between tensor-parallel regions, each rank has 1/T of the tokens.

What must be true: gather and scatter are each other's conjugates along the tokens; a block gives its share of what the
whole block gives, its norms see a T-th of the tokens, and it sends as many bytes as with all-reduces; gradients of the
norms are sums over ranks, made once. How it would be faked or got wrong: gather first, run a plain tensor-parallel
block and cut the result (the norms' inputs tell); an all-reduce and a slice, at twice the bytes; along the batch, which
no shape tells if both are alike; a slice where backward needs a sum; norms that drift apart from rank to rank; a
message a parameter.
"""

from __future__ import annotations

import pytest
import torch

from lab.harness.judge import close, measured
from lab.harness.layouts import every, told
from lab.harness.pytest_plugin import exercise

from . import probes_tensor as probes
from .carried import BOTH as DIRECTIONS
from .carried import asked, bytes_sent, messages
from .compose import bare, draw_state, train
from .probes_placed import part_of
from .tensor_oracles import (
    block_is_as_whole,
    draw_groups,
    draw_sizes,
    keeps_nothing,
    same_gradients,
    seats,
)

SEQUENCE = "mesh.sequence_parallel"
NEEDS = ["mesh.conjugates", "mesh.parallel_linear", "mesh.parallel_attention", "mesh.vocab_parallel"]
BOTH = ["gather_sequence", "scatter_sequence"]


def judged(run, rng, name: str, size: int, grouped: bool = False) -> tuple:
    """Judge both directions in all layouts; return the elements of a part, and each rank's values and messages.

    Batch and context differ, and T divides both.
    """
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    batch, part, width = size * rng.integers(1, 2), rng.integers(3, 4), rng.integers(2, 3)
    parts = [rng.normal(batch, part, width) for _ in range(world)]
    wholes = [rng.normal(batch, part * size, width) for _ in range(world)]
    gathers = name == "gather_sequence"
    cases = every(rng, dy=wholes if gathers else parts, x=parts if gathers else wholes)
    ranks = asked(run, probes.conjugate, name, cases, groups, world=world)
    gathered, summed = ("y", "dx") if gathers else ("dx", "y")
    for rank, place, group in seats(world, groups):
        for (given, lie), got in zip(cases, ranks[rank], strict=True):
            parts, wholes = (given[of] for of in (("x", "dy") if gathers else ("dy", "x")))
            what = f"of rank {rank} of {group}, in memory: {told(lie)}"
            want = torch.cat([parts[r] for r in group], dim=1)
            close(
                got[gathered], want.double(), want, f"{name}, {gathered} {what}", factor=2,
                dims="batch, token, width", cause="all ranks' tokens, in the order of the ranks",
            )  # fmt: skip
            stack = torch.stack([wholes[r] for r in group])
            want, plain = (t.sum(0).chunk(size, 1)[place] for t in (stack.double(), stack))
            close(
                got[summed], want, plain, f"{name}, {summed} {what}", factor=4,
                dims="batch, token, width", cause="the sum over ranks, of this rank's tokens",
            )  # fmt: skip
    return parts[0].numel(), ranks


@exercise(SEQUENCE, kind="numerics")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("world", [1, 2, 3, "groups"])
def test_one_direction_gathers_tokens_and_the_other_sums_and_cuts(run, rng, name, world):
    judged(run, rng, name, 2 if world == "groups" else world, grouped=world == "groups")


@exercise(SEQUENCE, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (3, False), (2, True)])
def test_a_block_on_its_share_of_the_tokens(run, rng, expect, size, grouped):
    block_is_as_whole(run, rng, expect, "block", size, grouped, sequence=True, needs=NEEDS)


def whole_step(sizes: dict, state: dict, batches: list, tied: bool, dtype: str) -> dict:
    """Losses of some micro-batches, and the gradient of their mean, in one process."""
    got = train(bare({"sizes": sizes, "tied": tied}, state, dtype), [batches])
    return {"losses": got["losses"][0], "gradients": got["gradients"][0]}


@exercise(SEQUENCE, kind="numerics")
@pytest.mark.parametrize(("sequence", "tied"), [(False, False), (True, False), (True, True)])
def test_a_whole_transformer_and_its_loss(run, rng, expect, sequence, tied):
    size = rng.integers(2, 3)
    sizes = draw_sizes(rng, size) | {"layers": 2}
    state = draw_state(rng, {"sizes": sizes}, 0.3)
    shape = (rng.integers(1, 2), sizes["context"])
    batches = [[rng.tokens(*shape, vocabulary=sizes["vocabulary"]) for _ in range(2)] for _ in range(2)]
    want, plain = (expect(whole_step, sizes, state, batches, tied, dtype) for dtype in ("float64", "float32"))
    ranks = run(probes.model, sizes, state, batches, [], sequence, tied, world=size, replace=NEEDS)
    for rank, got in enumerate(ranks):
        what = f"rank {rank} of {size}, {'sequence' if sequence else 'tensor'}-parallel"
        for i, loss in enumerate(got["losses"]):
            close(loss, want["losses"][i], plain["losses"][i], f"{what}, loss of micro-batch {i}", factor=10)
        same_gradients(got["gradients"], want["gradients"], plain["gradients"], what, rank, size)
        cut = {name: dim for name, dim in got["dims"] if dim is not None}
        for name, gradient in want["gradients"].items():
            assert (part_of(name, gradient, rank, size).shape != gradient.shape) == (name in cut), f"{what}: {name}"


@exercise(SEQUENCE, kind="numerics")
def test_tokens_that_do_not_divide_are_refused(run):
    told = run(probes.scatter_refused, [4, 2, 6], world=3)[0]
    # The group itself refuses parts that are no third, once they are sent.
    names = ["too late" if "reduce_scatter: expected" in said else said.partition(":")[0] for said in told]
    assert names == ["ValueError", "ValueError", "nothing"], (
        f"4, 2 and 6 tokens over 3 ranks: raised {told}, expected ValueError twice and nothing: check the number of "
        "tokens before you send any"
    )


@exercise(SEQUENCE, kind="property")
@pytest.mark.parametrize("name", BOTH)
def test_one_message_in_each_direction_and_nothing_kept(run, rng, name):
    part, ranks = judged(run, rng, name, 2)
    for rank, cases in enumerate(ranks):
        for way, rows in (row for got in cases for row in got["sent"].items()):
            gathers = (way == "forward") == (name == "gather_sequence")
            sent, want = messages(rows), [["all_gather" if gathers else "reduce_scatter", part]]
            assert sent == want, f"{name}, rank {rank}, {way}: sent {sent}, expected {want}"
    keeps_nothing(run, rng, name, 2 if name == "gather_sequence" else 1)


@exercise(SEQUENCE, kind="property")
def test_partial_gradients_are_summed_in_place_by_dtype(run, rng):
    dtypes = (torch.float32, torch.float32, torch.float64)
    shapes = [[rng.integers(2, 4) for _ in range(n)] for n in (1, 2, 1)]
    given = [[*(rng.normal(*s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)), None] for _ in range(2)]
    counts = [torch.Size(s).numel() for s in shapes]
    want = [["all_reduce", counts[0] + counts[1], "float32"], ["all_reduce", counts[2], "float64"]]
    for rank, got in enumerate(asked(run, probes.partial, given, world=2, parts=["finish"])):
        for place, (g, one, other) in enumerate(zip(got["gradients"], *given, strict=True)):
            right = g is None if one is None else g is not None and torch.equal(g, one + other)
            total = None if one is None else (one + other).tolist()
            assert right, f"rank {rank}, gradient {place}: expected {total}, got {g if g is None else g.tolist()}"
        assert got["in_place"], f"rank {rank}: .grad has become another tensor: sum in place, whoever has it sees it"
        told = [[row["op"], row["elements"], row["dtype"]] for row in got["sent"]["finish"]]
        assert told == want, f"rank {rank}: sent {told}, expected {want}: one message per dtype"


@exercise(SEQUENCE, kind="property")
def test_as_many_bytes_as_with_all_reduces_and_a_share_of_the_activations(run, rng, expect):
    size = rng.integers(2, 3)
    _, x, ranks = block_is_as_whole(run, rng, expect, "block", size, sequence=True, needs=NEEDS)
    share = [len(x), x.shape[1] // size, x.shape[2]]
    want = 4 * 2 * 2 * (size - 1) / size * x.numel()  # two all-reduces of x in float32
    for rank, got in enumerate(ranks):
        for part in DIRECTIONS:
            told, sent = messages(got["sent"][part]), bytes_sent(got["sent"][part])
            ops = sorted(op for op, _ in told)
            assert ops == ["all_gather"] * 2 + ["reduce_scatter"] * 2, (
                f"rank {rank}, {part}: sent {told}, expected two all-gathers and two reduce-scatters"
            )
            measured(f"bytes that a rank of {size} sends, {part}", sent, want, "bytes")
            assert sent == pytest.approx(want), (
                f"rank {rank}, {part}: {sent:.0f} bytes by a ring, expected {want:.0f}, those of two all-reduces"
            )
        assert got["norms"] == [[share, share]] * 2, (
            f"rank {rank} of {size}: the norms' inputs and outputs are {got['norms']}, expected {share}, a share of "
            "the tokens: gather behind the norm, not before it"
        )


@exercise(SEQUENCE, kind="property")
def test_gradients_of_all_norms_are_summed_in_one_message(run, rng, expect):
    sizes, _, ranks = block_is_as_whole(run, rng, expect, "block", rng.integers(2, 3), sequence=True, needs=NEEDS)
    for rank, got in enumerate(ranks):
        told = messages(got["sent"]["finish"])
        assert told == [["all_reduce", 2 * sizes["width"]]], (
            f"rank {rank}: sent {told} to sum the gradients of two norms of {sizes['width']}, expected one all_reduce"
        )
        for name in [name for name in got["gradients"] if "norm" in name]:
            total = torch.stack([r["before"][name] for r in ranks]).double().sum(0)
            close(got["gradients"][name], total, total.float(), f"rank {rank}, {name}", cause="the sum over ranks")
            assert torch.equal(got["gradients"][name], ranks[0]["gradients"][name]), (
                f"{name} has another gradient on rank {rank} than on rank 0: the replicas of a norm drift apart"
            )
