"""How long does one step take? Warm up, wait for the device, then time every step by itself."""

from collections.abc import Callable
from dataclasses import dataclass

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
    raise NotImplementedError("benchmarking.benchmark: Time `step` on the current device")
