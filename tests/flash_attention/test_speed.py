"""How fast, beside PyTorch's FlashAttention-2 in the same run. Needs a GPU; where there is none, it was not run.

Points by ratio: each test asks for a higher one. Rounds are interleaved, so that clocks and heat are shared; the ratio
is of medians. Results are compared on fresh inputs after timing. Below sm_80 the peer is attention in plain PyTorch.
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_kernels as probes
from .oracles import needs_triton

SPEED = "flash_attention.speed"
CASES = [("forward", False), ("forward", True), ("backward", True)]
pytestmark = [
    needs_triton,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize(("direction", "is_causal"), CASES),
]


def ratio(run, direction: str, is_causal: bool) -> float:
    got = run(probes.raced, direction, is_causal, triton="native", timeout=120.0)
    assert got["error"] <= 2, (
        f"after timing, on fresh inputs, results are {got['error']:.2g} times as far off as the peer's, allowed: 2"
    )
    return got["peer_s"] / got["own_s"]


@exercise(SPEED, kind="timing", triton="native")
def test_half_as_fast_as_flash_attention_2(run, direction, is_causal):
    assert (r := ratio(run, direction, is_causal)) >= 0.5, f"{direction}: {r:.2f} times the peer, expected 0.5"


@exercise(SPEED, kind="timing", triton="native")
def test_three_quarters_as_fast(run, direction, is_causal):
    assert (r := ratio(run, direction, is_causal)) >= 0.75, f"{direction}: {r:.2f} times the peer, expected 0.75"


@exercise(SPEED, kind="timing", triton="native")
def test_as_fast(run, direction, is_causal):
    assert (r := ratio(run, direction, is_causal)) >= 0.95, f"{direction}: {r:.2f} times the peer, expected 0.95"


@exercise(SPEED, kind="timing", triton="native")
def test_faster(run, direction, is_causal):
    assert (r := ratio(run, direction, is_causal)) >= 1.1, f"{direction}: {r:.2f} times the peer, expected 1.1"
