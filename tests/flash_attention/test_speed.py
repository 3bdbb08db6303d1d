"""Speed compared with PyTorch's FlashAttention-2 in the same run. Needs a GPU; without one, the tests are skipped.

Each test requires a higher ratio. Both functions take turns on fresh inputs, so they share clocks and heat; one of our
results is checked after every repeat. Below sm_80, the peer is attention in plain PyTorch.
"""

import pytest
import torch

from lab.harness.compare import compare
from lab.harness.judge import decide, timed
from lab.harness.pytest_plugin import exercise

from . import probes_speed as probes
from .oracles import needs_triton

SPEED = "flash_attention.speed"
CASES = [("forward", False), ("forward", True), ("backward", True)]
pytestmark = [
    needs_triton,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize(("direction", "is_causal"), CASES),
]


def check_speed(run, rng, direction: str, is_causal: bool, bar: float) -> None:
    def more_pairs():
        traces = run.trace(
            probes.raced, direction, is_causal, 12, rng.integers(0, 10**6), triton="native", timeout=120.0
        )
        return timed(traces, least_s=0.0, allowed=2.0)  # our error may be twice the peer's

    decide(
        compare(more_pairs, bar, pairs=(12, 96)),
        f"{direction}{', causal' * is_causal}, 4096 queries, dim 128, beside PyTorch's FlashAttention-2",
    )


@exercise(SPEED, kind="timing", triton="native")
def test_half_as_fast_as_flash_attention_2(run, rng, direction, is_causal):
    check_speed(run, rng, direction, is_causal, 0.5)


@exercise(SPEED, kind="timing", triton="native")
def test_three_quarters_as_fast(run, rng, direction, is_causal):
    check_speed(run, rng, direction, is_causal, 0.75)


@exercise(SPEED, kind="timing", triton="native")
def test_as_fast_as_flash_attention_2(run, rng, direction, is_causal):
    check_speed(run, rng, direction, is_causal, 0.95)


@exercise(SPEED, kind="timing", triton="native")
def test_faster_than_flash_attention_2(run, rng, direction, is_causal):
    check_speed(run, rng, direction, is_causal, 1.1)
