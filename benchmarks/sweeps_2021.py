"""Checks whether the planner predicts the orders that Narayanan et al. 2021, section 5, state in text or figures."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MEGATRON_2021, Job, Plan, gpt


def sweeps() -> str:
    """Print each claim. Return a text with the number that hold, and those that do not."""
    print("\n## Sweeps of Narayanan et al. 2021: is the order right?\n")
    print("| claim | predicted TFLOP/s | right |\n|---|---|---|")
    claims, wrong = _claims(), []
    for words, values, holds in claims:
        right = holds(list(values.values()))
        speeds = ", ".join(f"{k}: {v:.0f}" for k, v in values.items())
        print(f"| {words} | {speeds} | {'yes' if right else 'NO'} |", flush=True)
        if not right:
            wrong.append(f"Not {words}: {', '.join(f'{k} {v:.1f}' for k, v in values.items())} TFLOP/s.")
    ordered = f"Sweeps of Narayanan et al. 2021 in the right order: {len(claims) - len(wrong)} of {len(claims)}."
    return " ".join([ordered, *wrong])


def _claims() -> list[tuple[str, dict[str, float], Callable[[list[float]], bool]]]:
    def speed(model: tuple[int, int, int], sequences: int, plan: Plan, **change: Any) -> float:
        gpus = plan.data * plan.pipe * plan.tensor
        job = Job(gpt(*model), sequences, 2048, cluster("dgx-a100", gpus), replace(MEGATRON_2021, **change))
        return steps.model_flops(job, True) / steps.price(job, replace(plan, recompute="full")).step_s / gpus / 1e12

    def falls(v: list[float]) -> bool:
        return all(a > b for a, b in pairwise(v))

    claims: list[tuple[str, dict[str, float], Callable[[list[float]], bool]]] = []
    big, small, middle, large = (32, 20480, 128), (32, 3840, 32), (48, 12288, 96), (96, 12288, 96)
    degrees = (2, 4, 8, 16, 32)
    for b in (32, 128):
        values = {f"tensor {t}": speed(big, b, Plan(1, 64 // t, t)) for t in degrees}
        claims.append((f"figure 13, 162B, batch {b}: best with tensor = 8, a node", values, lambda v: max(v) == v[2]))
    for b in (32, 128, 512):
        values = {f"pipe {p}": speed(small, b, Plan(64 // p, p, 1)) for p in degrees}
        claims.append((f"figure 14, 5.9B, batch {b}: slower the more pipe in place of data", values, falls))
        values = {f"tensor {t}": speed(small, b, Plan(64 // t, 1, t)) for t in degrees}
        claims.append((f"figure 15, 5.9B, batch {b}: slower the more tensor in place of data", values, falls))
    for b in (128, 512):
        values = {f"micro-batch {m}": speed(middle, b, Plan(1, 8, 8, m)) for m in (1, 2, 4, 8)}
        claims.append((f"figure 16, 91B, batch {b}: best with micro-batch 2", values, lambda v: max(v) == v[1]))
    gains = {}
    for b in (12, 24, 36, 48, 60):
        gains[f"batch {b}"] = 100 * speed(large, b, Plan(1, 12, 8, 1, 2)) / speed(large, b, Plan(1, 12, 8)) - 100
    claims.append(("figure 12, 175B: interleaving gains, per cent, and less the larger the batch", gains,
                   lambda v: min(v) > 0 and falls(v)))  # fmt: skip
    values = {}
    for on in (True, False):
        values["scatter/gather" if on else "whole"] = speed(large, 60, Plan(1, 12, 8, 1, 2), scatter_messages=on)
    claims.append(("figure 18, 175B: scatter/gather gains, at most 11 %", values,
                   lambda v: 1 < v[0] / v[1] <= 1.115))  # fmt: skip
    return claims
