"""How long does one step take? Warm up, wait for the device, then time every step by itself."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Timing:
    """The result of `benchmark`, in seconds.

    samples: one per measured step, in order. mean, median: of the samples. standard_deviation: of the samples, with
    n − 1 in the denominator; 0.0 for a single sample.
    """

    mean: float
    median: float
    standard_deviation: float
    samples: tuple[float, ...]


def benchmark(step: Callable[[], object], *, warmup: int = 5, steps: int = 20) -> Timing:
    """Time `step` on the current device: CUDA where it is available, else the CPU.

    Call step() warmup + steps times: first `warmup` times without measuring (first calls compile, allocate and fill
    caches), then `steps` times measured. A sample is the time from just before a call of step() until the device has
    finished everything that this call launched, on any stream. It contains nothing of the warm-up or of another step.
    Use a clock that is never set back.

    Returns a Timing in seconds. Raises ValueError, before any step, unless warmup ≥ 0 and steps ≥ 1.
    Source: CUDA C++ Best Practices Guide, "Performance Metrics: Using CPU Timers".
    """
    if warmup < 0 or steps < 1:
        raise ValueError(f"expected warmup >= 0 and steps >= 1, got warmup={warmup}, steps={steps}")
    for _ in range(warmup):
        step()
    _wait_for_device()  # or what is left of the warm-up runs into the first sample

    samples = []
    for _ in range(steps):
        start = perf_counter()
        step()
        _wait_for_device()  # step() returned when its work was queued, not when it was done
        samples.append(perf_counter() - start)

    return Timing(
        mean=statistics.mean(samples),
        median=statistics.median(samples),
        standard_deviation=statistics.stdev(samples) if steps > 1 else 0.0,
        samples=tuple(samples),
    )


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
