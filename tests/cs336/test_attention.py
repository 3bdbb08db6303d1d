"""FlashAttention-2 as CS336 asks for it: (batch, length, dim) in float32, lengths and dim powers of two from 16.

The PyTorch version need not know a causal mask; the Triton version must. Its backward pass may be recomputation in
PyTorch. How it would be faked: the same function handed in for both (a kernel must run, and torch may not multiply).
"""

from __future__ import annotations

import pytest

from lab.judge import close
from lab.pytest_plugin import exercise

from ..flash_attention.oracles import attention, needs_triton
from ..flash_attention.oracles import gradients as gradients_of
from . import probes

PYTORCH, TRITON = "flash_attention.tiled_forward", "flash_attention.triton_forward"
BACKWARD = "flash_attention.tiled_backward"
ARITHMETIC = {"mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "_softmax", "exp", "exp2", "logsumexp"}


def draw(rng) -> list:
    """q, k, v and do."""
    shape = (rng.integers(2, 4), rng.choice([32, 64]), rng.choice([16, 32]))
    return [rng.normal(*shape) for _ in range(4)]


def check_forward(run, rng, expect, kind, is_causal):
    q, k, v, do = draw(rng)
    got = run(probes.attend, kind, q, k, v, do, is_causal)
    want, plain = (expect(attention, q, k, v, is_causal, d) for d in ("float64", "float32"))
    what = f"q, k, v {tuple(q.shape)}{', causal' * is_causal}"
    close(got["o"], want["o"], plain["o"], f"o of {what}", factor=20, dims="batch, query, dim")
    found = [t for t in got["saved"] if t.shape == q.shape[:-1]]
    assert len(found) == 1, (
        f"expected one saved tensor of shape {tuple(q.shape[:-1])}, the log-sum-exp of each query; saved: "
        f"{[tuple(t.shape) for t in got['saved']]}"
    )
    close(found[0], want["lse"], plain["lse"], f"lse of {what}", factor=20, dims="batch, query")


def check_backward(run, rng, expect, kind, is_causal):
    q, k, v, do = draw(rng)
    got = run(probes.gradients, kind, q, k, v, do, is_causal)
    want, plain = (expect(gradients_of, q, k, v, do, is_causal, d) for d in ("float64", "float32"))
    for name in ("dq", "dk", "dv"):
        what = f"{name} of {tuple(q.shape)}{', causal' * is_causal}, {kind}"
        close(got[name], want[name], plain[name], what, factor=20, dims="batch, row, dim")


@exercise(PYTORCH, kind="numerics")
def test_the_pytorch_version_is_attention(run, rng, expect):
    check_forward(run, rng, expect, "pytorch", False)


@exercise(BACKWARD, kind="numerics")
def test_the_pytorch_versions_gradients(run, rng, expect):
    check_backward(run, rng, expect, "pytorch", False)


@needs_triton
@exercise(TRITON, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_triton_version_is_attention(run, rng, expect, is_causal):
    check_forward(run, rng, expect, "triton", is_causal)


@needs_triton
@exercise(BACKWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_triton_versions_gradients(run, rng, expect, is_causal):
    check_backward(run, rng, expect, "triton", is_causal)


@needs_triton
@exercise(TRITON, kind="property")
def test_a_kernel_does_the_work(run, rng):
    got = run(probes.attend, "triton", *draw(rng), False)
    assert got["kernels"], "no kernel was launched: the Triton version is to run one"
    other = sorted(ARITHMETIC & {*got["operators"]})
    assert not other, f"torch ran {', '.join(other)} in forward: the kernel is to do that"
