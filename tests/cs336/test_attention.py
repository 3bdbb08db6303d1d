"""FlashAttention-2 as CS336 requires it: (batch, length, dim) in float32, lengths and dim powers of two from 16.

The PyTorch version need not support a causal mask. The Triton version must, aligned top left; its backward pass may
recompute in PyTorch. Typical fakes: one function for both versions (caught because a kernel must run, and torch may not
multiply); whole rows of scores (caught by the shapes that torch computes). Typical errors: a tile is longer than the
sequence and not masked; the code assumes as many keys as queries (other lengths are always tried, and one drawn pair);
the code assumes that the output's gradient has the output's memory layout.
"""

from __future__ import annotations

import math

import pytest

from lab.harness.judge import close
from lab.harness.layouts import lay_out
from lab.harness.pytest_plugin import exercise

from ..flash_attention.oracles import attention, needs_triton
from ..flash_attention.oracles import gradients as gradients_of
from . import probes

PYTORCH, TRITON = "flash_attention.tiled_forward", "flash_attention.triton_forward"
BACKWARD = "flash_attention.tiled_backward"
ARITHMETIC = {"mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "_softmax", "exp", "exp2", "logsumexp"}
LENGTHS = (16, 32, 64, 128)
SQUARE = [(n, n) for n in LENGTHS]
OTHER = [(16, 64), (64, 16), (32, 128), (128, 32), (16, 128), (128, 16)]
LAYOUTS = {"expanded": "one number", "transposed": "columns first", "strided": "sliced", "contiguous": "contiguous"}
CAUSES = {
    "square": "is a tile larger than these lengths, and not masked?",
    "not square": "are queries and keys taken to be equally many?",
    "drawn": "",
}
lengths = pytest.mark.parametrize("which", CAUSES)
layouts = pytest.mark.parametrize("layout", [*LAYOUTS][:3])
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def draw(rng, which: str) -> list:
    """Draw cases, each (q, k, v, do)."""
    drawn = [(rng.choice([64, 128, 256]), rng.choice([64, 128, 256]))]
    pairs = {"one": [(64, 64)], "square": SQUARE, "not square": OTHER, "drawn": drawn}[which]
    batch, dim = rng.integers(1, 3), rng.choice([16, 32, 64])
    return [
        [rng.normal(batch, queries, dim), rng.normal(batch, keys, dim), rng.normal(batch, keys, dim),
         rng.normal(batch, queries, dim)] for queries, keys in pairs
    ]  # fmt: skip


def check_forward(run, rng, expect, kind, which, is_causal):
    cases = draw(rng, which)
    for (q, k, v, _), got in zip(cases, run(probes.attend, kind, cases, is_causal), strict=True):
        want, plain = (expect(attention, q, k, v, is_causal, d) for d in ("float64", "float32"))
        what = f"q {tuple(q.shape)}, k {tuple(k.shape)}{', causal' * is_causal}"
        close(got["o"], want["o"], plain["o"], f"o of {what}", 20, "batch, query, dim", CAUSES[which])
        found = [t for t in got["saved"] if t.shape == q.shape[:-1]]
        assert len(found) == 1, (
            f"expected one saved tensor of shape {tuple(q.shape[:-1])}, the log-sum-exp of each query; saved: "
            f"{[tuple(t.shape) for t in got['saved']]}"
        )
        close(found[0], want["lse"], plain["lse"], f"lse of {what}", 20, "batch, query", CAUSES[which])


def check_backward(run, rng, expect, kind, which, is_causal, layout="contiguous"):
    cases = draw(rng, which)
    cause = f"is a gradient of o that is {layout} read by o's strides?" if which == "one" else CAUSES[which]
    for case, got in zip(cases, run(probes.gradients, kind, cases, is_causal, LAYOUTS[layout]), strict=True):
        q, k, v, do = case
        do = lay_out(do, LAYOUTS[layout]).contiguous()
        want, plain = (expect(gradients_of, q, k, v, do, is_causal, d) for d in ("float64", "float32"))
        for name in ("dq", "dk", "dv"):
            what = f"{name} of q {tuple(q.shape)}, k {tuple(k.shape)}{', causal' * is_causal}, {kind}"
            close(got[name], want[name], plain[name], what, 20, "batch, row, dim", cause)


@exercise(PYTORCH, kind="numerics")
@lengths
def test_the_pytorch_version_is_attention(run, rng, expect, which):
    check_forward(run, rng, expect, "pytorch", which, False)


@exercise(BACKWARD, kind="numerics")
@lengths
def test_the_pytorch_versions_gradients(run, rng, expect, which):
    check_backward(run, rng, expect, "pytorch", which, False)


@exercise(BACKWARD, kind="numerics")
@layouts
def test_the_pytorch_version_takes_any_gradient_of_its_output(run, rng, expect, layout):
    check_backward(run, rng, expect, "pytorch", "one", False, layout)


@needs_triton
@exercise(TRITON, kind="numerics")
@lengths
@causal
def test_the_triton_version_is_attention(run, rng, expect, which, is_causal):
    check_forward(run, rng, expect, "triton", which, is_causal)


@needs_triton
@exercise(BACKWARD, kind="numerics")
@lengths
@causal
def test_the_triton_versions_gradients(run, rng, expect, which, is_causal):
    check_backward(run, rng, expect, "triton", which, is_causal)


@needs_triton
@exercise(BACKWARD, kind="numerics")
@layouts
def test_the_triton_version_takes_any_gradient_of_its_output(run, rng, expect, layout):
    check_backward(run, rng, expect, "triton", "one", True, layout)


@exercise(PYTORCH, kind="property")
def test_scores_are_computed_tile_by_tile(run, rng, expect):
    queries, keys, dim = 64, 2048, 16
    q, k, v = rng.normal(1, queries, dim), rng.normal(1, keys, dim), rng.normal(1, keys, dim)
    got = run(probes.computed, q, k, v, sorted(ARITHMETIC))
    want, plain = (expect(attention, q, k, v, False, d) for d in ("float64", "float32"))
    close(got["o"], want["o"], plain["o"], f"o of q {tuple(q.shape)}, k {tuple(k.shape)}", 20, "batch, query, dim")
    large = [shape for shape in got["shapes"] if max(shape, default=0) > keys // 2]
    assert not large, f"torch computed a tensor of shape {large[0]}, of {keys} keys: scores exist tile by tile alone"


@needs_triton
@exercise(TRITON, kind="property")
def test_a_kernel_does_the_work(run, rng):
    (got,) = run(probes.attend, "triton", draw(rng, "drawn"), False)
    assert got["grids"], "no kernel was launched: the Triton version is to run one"
    other = sorted(ARITHMETIC & {*got["operators"]})
    assert not other, f"torch ran {', '.join(other)} in forward: the kernel is to do that"


@needs_triton
@exercise(TRITON, kind="property")
def test_programs_share_the_queries(run, rng):
    """With one program per matrix, that program would process all queries alone, without parallelism."""
    case = [rng.normal(2, 512, 16) for _ in range(4)]
    (got,) = run(probes.attend, "triton", [case], False)
    programs = max((math.prod(grid) for grid in got["grids"]), default=0)
    assert programs >= 2 * 512 // 128, (
        f"grids of {got['grids']} for 2 matrices of 512 queries: expected at least {2 * 512 // 128} programs, one for "
        "each tile of queries"
    )
