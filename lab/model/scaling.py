"""Scaling laws: how large a model to train with a given amount of compute, and on how much text."""

import math

TOKENS_A_PARAMETER = 20


def compute_optimal(flops: float) -> tuple[float, float]:
    """(parameters N, tokens D) with the least loss for this many training FLOPs: 6·N·D = flops and D = 20·N.

    Chinchilla's 5.76e23 FLOPs give 69 billion parameters and 1.4 trillion tokens; it had 70 and 1.4. Source:
    Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models".
    """
    if not flops > 0:
        raise ValueError(f"expected flops > 0, got {flops}")
    parameters = math.sqrt(flops / (6 * TOKENS_A_PARAMETER))
    return parameters, TOKENS_A_PARAMETER * parameters
