"""Probes of `benchmark`: it times steps whose durations are known."""

import functools
import gc
from typing import Any

import torch

from lab.harness.calls import plain
from lab.harness.raising import raised
from lab.measure import clock
from lab.measure.device import current
from lab.ranks import gates

COLLECT_S = 0.03  # seconds of a garbage collection in a process that has imported torch


def timed_steps(
    impl: Any, host_s: list[float], device_s: list[float], stream_s: list[float], warmup: int, steps: int
) -> dict:
    """Time steps on the simulated GPU. Call i keeps the host busy for host_s[i], then queues work and returns.

    The current stream gets device_s[i] seconds of work, another stream stream_s[i] seconds; 0 queues nothing.
    """
    gpu = current()
    side_stream = torch.cuda.Stream()
    starts, ends, busy = [], [], []
    gpu.on_wait = functools.partial(gates.mark, "wait")

    def step() -> None:
        gates.mark("step")
        call = min(len(starts), len(host_s) - 1)
        gpu.calls.append("step")
        starts.append(gpu.now)
        busy.append(gpu.busy())
        gpu.sleep(host_s[call])
        if device_s[call]:
            gpu.launch(device_s[call])
        if stream_s[call]:
            gpu.launch(stream_s[call], side_stream)
        ends.append(max(gpu.now, *(s.tail for s in gpu.streams)))

    def on_gc(phase: str, info: dict) -> None:
        if phase == "start" and info["generation"] == 2:
            gpu.calls.append("gc.collect")
            gpu.sleep(COLLECT_S)

    gc.disable()  # from here on, collections are explicit
    gc.callbacks.append(on_gc)
    timing = impl.benchmarking.benchmark.benchmark(step, warmup=warmup, steps=steps)
    gc.callbacks.remove(on_gc)
    return {
        **plain(timing),
        "calls": len(starts),
        "order": [*gpu.calls],  # the last few thousand calls: steps, clock reads, collections, waits for the device
        "busy": busy,  # whether the device was still busy when call i began
        "pauses": [begin - end for begin, end in zip(starts[1:], ends[:-1], strict=True)],
        "busy_at_the_end": gpu.busy(),
    }


def timed_products(impl: Any, shapes: list[list[int]], warmup: int, steps: int) -> dict:
    """Time real operators on "cuda" tensors: call i multiplies float32 matrices (m, k) and (k, n)."""
    pairs = [(torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")) for m, k, n in shapes]
    calls = iter(pairs)

    def step() -> torch.Tensor:
        a, b = next(calls)
        return a @ b

    return plain(impl.benchmarking.benchmark.benchmark(step, warmup=warmup, steps=steps))


def busy_host(impl: Any, host_s: list[float], warmup: int, steps: int) -> dict:
    """Time steps without the simulation. Call i keeps the CPU busy for host_s[i] real seconds."""
    calls = iter(host_s)

    def step() -> None:
        end = clock.perf_counter() + next(calls)
        while clock.perf_counter() < end:
            pass

    start = clock.perf_counter()
    timing = impl.benchmarking.benchmark.benchmark(step, warmup=warmup, steps=steps)
    return {**plain(timing), "seconds": clock.perf_counter() - start}


def refused(impl: Any, warmup: int, steps: int) -> dict:
    """The exception that `benchmark` raises for invalid counts, and how often it called step()."""
    calls = []
    benchmark = impl.benchmarking.benchmark.benchmark
    error = raised(lambda: benchmark(lambda: calls.append(1), warmup=warmup, steps=steps))
    return {"raised": error, "calls": len(calls)}
