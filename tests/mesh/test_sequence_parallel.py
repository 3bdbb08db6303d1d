"""Sequence parallelism: between tensor-parallel regions, each rank has 1/T of the tokens.

Must hold: gather and scatter are each other's conjugates along the tokens. A block gives its share of the whole block's
result, its norms see 1/T of the tokens, and it sends as many bytes as with all-reduces. The gradients of the norms are
summed over ranks, once.
Typical fakes: gather first, run a plain tensor-parallel block and slice the result (caught by the norms' inputs); an
all-reduce and a slice, at twice the bytes; a cut along the batch (caught where batch and tokens differ in size); a
slice where backward needs a sum; norms that drift apart between ranks; one message per parameter.
"""

import pytest
import torch

from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_tensor as probes
from .carried import BOTH, traced
from .tensor_oracles import check_conjugate, check_layer, check_nothing_kept, check_one_message, draw_block

SEQUENCE = "mesh.sequence_parallel"
NAMES = ["gather_sequence", "scatter_sequence"]


@exercise(SEQUENCE, kind="numerics")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2, 3, "groups"])
def test_one_direction_gathers_tokens_and_the_other_sums_and_cuts(run, rng, name, world):
    check_conjugate(run, rng, name, 2 if world == "groups" else world, world == "groups")


def check_block(run, rng, expect, size: int, grouped: bool = False) -> tuple:
    """Judge a block whose tokens are divided over ranks; return x, and each rank's values and messages."""
    drawn = _, _, x, _ = draw_block(rng, "block", size)
    return x, check_layer(run, rng, expect, "block", drawn, size, grouped, sequence=True)


@exercise(SEQUENCE, kind="numerics")
@pytest.mark.parametrize(("size", "grouped"), [(1, False), (3, False), (2, True)])
def test_a_block_on_its_share_of_the_tokens(run, rng, expect, size, grouped):
    check_block(run, rng, expect, size, grouped)


@exercise(SEQUENCE, kind="numerics")
def test_tokens_that_do_not_divide_are_refused(run):
    errors = run(probes.scatter_refused, [4, 2, 6], world=3)[0]
    # The group also refuses parts that are not a third, but only once they are sent.
    names = ["too late" if "reduce_scatter: expected" in error else error.partition(":")[0] for error in errors]
    assert names == ["ValueError", "ValueError", "nothing"], (
        f"4, 2 and 6 tokens over 3 ranks: raised {errors}, expected ValueError twice and nothing: check the number of "
        "tokens before you send any"
    )


@exercise(SEQUENCE, kind="property")
@pytest.mark.parametrize("name", NAMES)
def test_one_message_in_each_direction_and_nothing_kept(run, rng, name):
    check_one_message(run, rng, name, 2)
    check_nothing_kept(run, rng, name, 2 if name == "gather_sequence" else 1)


@exercise(SEQUENCE, kind="property")
def test_partial_gradients_are_summed_in_place_by_dtype(run, rng):
    dtypes = (torch.float32, torch.float32, torch.float64)
    shapes = [[rng.integers(2, 4) for _ in range(n)] for n in (1, 2, 1)]
    gradients = [[*(rng.normal(*s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)), None] for _ in range(2)]
    counts = [torch.Size(s).numel() for s in shapes]
    want = [["all_reduce", counts[0] + counts[1], "float32"], ["all_reduce", counts[2], "float64"]]
    for rank, got in enumerate(traced(run, probes.partial, gradients, world=2, parts=["finish"])):
        for index, (g, one, other) in enumerate(zip(got["gradients"], *gradients, strict=True)):
            right = g is None if one is None else g is not None and torch.equal(g, one + other)
            total = None if one is None else (one + other).tolist()
            assert right, f"rank {rank}, gradient {index}: expected {total}, got {g if g is None else g.tolist()}"
        assert got["in_place"], f"rank {rank}: .grad has become another tensor: sum in place, whoever has it sees it"
        sends(got["sent"]["finish"], want, f"rank {rank}", "one message per dtype", ("op", "elements", "dtype"))


@exercise(SEQUENCE, kind="property")
def test_as_many_bytes_as_with_all_reduces_and_a_share_of_the_activations(run, rng, expect):
    size = rng.integers(2, 3)
    x, ranks = check_block(run, rng, expect, size)
    share = [len(x), x.shape[1] // size, x.shape[2]]
    part_bytes = 4 * x.numel() // size  # on a ring, one of each sends the bytes of one all-reduce of x
    want = [["all_gather", part_bytes]] * 2 + [["reduce_scatter", part_bytes]] * 2
    for rank, got in enumerate(ranks):
        for part in BOTH:
            rows = sorted(got["sent"][part], key=lambda row: row["op"])
            sends(rows, want, f"rank {rank} of {size}, {part}", "one pair for each half of the block", ["op", "bytes"])
        assert got["norms"] == [[share, share]] * 2, (
            f"rank {rank} of {size}: the norms' inputs and outputs are {got['norms']}, expected {share}, a share of "
            "the tokens: gather behind the norm, not before it"
        )
