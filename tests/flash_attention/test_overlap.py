"""The forward kernel that overlaps the product p v of one step with the exponentials of the next.

Must hold: o and lse are those of attention; in machine code for sm_90 at dim 128, exponentials are issued while a wgmma
of the same warp is in flight; nothing spills, and a program fits in shared memory. Typical fakes: the plain kernel
(caught because no exponential overlaps); one kernel for numbers and another for compiling (caught by comparing
sources); the last product is left out, or rescaled by the alpha of the wrong step (caught by one tile of keys, several,
and a causal diagonal).
"""

import functools

import pytest
import torch

from lab.harness.calls import refused
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import judged
from . import probes_kernels as probes
from .oracles import MODES, PRECISIONS, draw, needs_triton

OVERLAP = "flash_attention.overlap"
CAUSE = "is each p multiplied by the v of its own keys, once, and acc rescaled by the alpha of the same step?"
SHARED = 227 << 10  # bytes that a program on sm_90 can have at most
pytestmark = needs_triton


@pytest.fixture
def check(run, rng, expect):
    return functools.partial(judged.check, "overlapped", run, rng, expect)


@exercise(OVERLAP, kind="numerics")
@pytest.mark.parametrize("where", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS[1:])
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_is_that_of_attention(check, rng, is_causal, dtype, where):
    short, n = (rng.integers(17, 60), rng.integers(17, 60)), rng.integers(260, 300)
    sizes = [(1, 1), short, (n, n + rng.integers(1, 99)), (n, 40)]
    for (queries, keys), dim in zip(sizes, [1, 64, 128, rng.choice([20, 33])], strict=True):
        count, scale = 2 if queries < 99 else 1, rng.choice([1.0, 20.0])
        drawn = draw(rng, queries, keys, batch=count, heads=count, group=2, dim=dim, dtype=dtype, scale=scale)
        check(drawn, is_causal, CAUSE, where=where)


@exercise(OVERLAP, kind="numerics")
def test_float32_and_wide_heads_are_refused(run):
    cases = [(16, "float32", "float32"), (16, "float16", "bfloat16"), (136, *["float16"] * 2), (0, *["float16"] * 2)]
    for dim, qk, v in cases:
        tensors = [torch.zeros(1, 2, 8, dim, dtype=getattr(torch, dtype)) for dtype in (qk, qk, v)]
        (raised,) = run(refused, "impl.flash_attention.overlap.attention_forward_overlapped", [tensors])
        assert raised == "ValueError", f"dim {dim}, q and k {qk}, v {v}: {raised} was raised, expected ValueError"


@exercise(OVERLAP, kind="property", triton="native")
@pytest.mark.parametrize("is_causal", [False, True])
def test_exponentials_of_the_one_kernel_run_beside_a_product(run, check, rng, is_causal):
    drawn = draw(rng, 257, 150, batch=1, heads=1, dim=128, dtype="float16")
    interpreted = check(drawn, is_causal, CAUSE, keep=True, where="interpret")
    judged.check_single_launch(interpreted)
    got = run(probes.overlapped, is_causal, "bfloat16", triton="native")
    what = f"for sm_90, bfloat16, dim 128{', causal' * is_causal}, tiles of {got['tile']}, {got['warps']} warps"
    measured(f"share of exponentials{', causal' * is_causal}, without a wgmma", 1 - got["covered"], 0.1, at_most=True)
    assert [source for source, _ in interpreted["sources"]] == [got["source"]], (
        f"{what}: the interpreter ran another kernel than the one that compiles"
    )
    assert got["spilled"] == 0, (
        f"{what}: {got['spilled']} bytes spill, since p and alpha take registers from step to step: share a tile "
        "among more warps (num_warps), or give it fewer rows"
    )
    assert got["shared"] <= SHARED, (
        f"{what}: {got['shared']:,} bytes of shared memory, a program has {SHARED:,}: carry p in float32, in registers"
    )
    assert got["covered"] >= 0.9, (
        f"{what}: {got['covered']:.0%} of {got['exponentials']} exponentials are issued while a wgmma of their warp is "
        "in flight, expected 90%: start the product of the step before after this step's scores, before its exp2"
    )
