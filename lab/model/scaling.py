"""Scaling laws: how large a model to train with a given amount of compute, and on how much text."""

import math

TOKENS_PER_PARAMETER = 20


def compute_optimal(flops: float) -> tuple[float, float]:
    """Return (parameters N, tokens D) with the least loss for these training FLOPs: 6·N·D = flops and D = 20·N.

    For the 5.76e23 FLOPs of Chinchilla: 69 billion parameters and 1.4 trillion tokens. Its authors used 70 billion and
    1.4 trillion. Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models".
    """
    if not flops > 0:
        raise ValueError(f"expected flops > 0, got {flops}")
    parameters = math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    return parameters, TOKENS_PER_PARAMETER * parameters
