"""`benchmark` on a simulated device that knows the duration of every step.

Must hold: each sample is the duration of its own step, from its call until the device is done, and the statistics are
those of the samples. Typical fakes: no wait for the device (caught because a launch returns in 5 µs and its work takes
milliseconds); one wait for all steps and a division, sorted samples, or one sample repeated (caught because every step
has its own length); a wait for the current stream only (caught by work on another stream); the end of the device's work
in place of the clock (caught by work on the host); a warm-up that is measured, or still runs when measuring starts
(caught by slow first calls, and by much work in the last); garbage collection in the loop (caught because the device
idles); a clock that stops in sleep, or one saved before the simulation starts (caught because the implementation is
imported later); invented numbers (caught by lengths drawn from the seed, and by counting calls); the simulator's own
numbers (caught because the switch records whether code waited for the device, or polled it until it was done).
"""

import itertools
import math
import statistics
from collections.abc import Callable

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes

BENCHMARK = "benchmarking.benchmark"
# A sample may include host time for the calls around a step: at most a dozen clock reads, events and waits, of 0.05
# to 0.5 µs each, and one launch of 5 µs. A step takes at least 1 ms.
OVERHEAD_S = 20e-6


def draw_steps(rng, warmup: int, steps: int) -> dict:
    """Draw lengths of all calls. First calls are slow, as if they compiled; the last warm-up call queues the most."""
    calls = warmup + steps
    host_s = [0.0] * calls
    device_s = [rng.uniform(2e-3, 20e-3) for _ in range(calls)]
    for call in range(min(2, warmup)):
        host_s[call] = rng.uniform(0.3, 0.6)
    if warmup:
        device_s[warmup - 1] = rng.uniform(0.5, 0.9)
    stream_s = [0.0] * calls
    return {"host_s": host_s, "device_s": device_s, "stream_s": stream_s, "warmup": warmup, "steps": steps}


def measure(run, drawn: dict) -> dict:
    """Return the probe's result. Assert the numbers of calls and samples, and that right samples come from waiting."""
    (trace,) = run.trace(probes.timed_steps, *drawn.values(), device="simulated", world=1)
    got, warmup, steps = trace.values, drawn["warmup"], drawn["steps"]
    hint = ": there was no warm-up" if got["calls"] == steps else ""
    assert got["calls"] == warmup + steps, (
        f"step() ran {got['calls']} times, expected {warmup} (warm-up) + {steps} (measured){hint}"
    )
    note = f", {warmup} + {steps}: those of the warm-up are among them" if len(got["samples"]) > steps else ""
    assert len(got["samples"]) == steps, (
        f"{len(got['samples'])} samples of {steps} measured steps{note}: one sample a measured step"
    )
    seen = " ".join(gate.name for gate in trace.gates).split("step")  # before the first step, and after each
    waited = ["wait" in names for names in seen[warmup + 1 :]]
    pairs = zip(got["samples"], expected_samples(drawn), strict=True)
    if all(abs(sample - expected) <= OVERHEAD_S for sample, expected in pairs):
        assert [True] * steps == waited, (
            f"the samples are right, but {steps - sum(waited)} of {steps} steps ended without asking the device: "
            "wait for it, or poll it until it is done; only the device knows when a step has ended"
        )
    return got


def check(
    run, drawn: dict, where: str = "", cause: Callable[[dict], str] = lambda got: "", first: int | None = None
) -> None:
    """Assert that the samples, or the `first` ones, are the durations of their steps."""
    got = measure(run, drawn)
    samples, expected = got["samples"][:first], expected_samples(drawn)[:first]
    why = cause(got) or gc_hint(got, drawn)
    assert_samples(samples, expected, where, why, context=lambda index: calls_hint(got, drawn, index))


def gc_hint(got: dict, drawn: dict) -> str:
    """A hint if garbage is collected during measurement, else ""."""
    steps = [i for i, what in enumerate(got["order"]) if what == "step"]
    measured_from = steps[min(drawn["warmup"], len(steps) - 1)]
    return "gc.collect() takes longer than many a step: call it before the loop, if at all" * (
        "gc.collect" in got["order"][measured_from:]
    )


def calls_hint(got: dict, drawn: dict, index: int) -> str:
    """The calls around the measured steps, in order; "" if unknown, or if there are more than 8 in one place."""
    order, warmup = got["order"], drawn["warmup"]
    steps = [i for i, what in enumerate(order) if what == "step"]
    if len(steps) != got["calls"]:
        return ""
    first = order[steps[warmup - 1] + 1 if warmup else 0 : steps[warmup]]
    after = order[steps[-1] + 1 :]
    gaps = [order[a + 1 : b] for a, b in itertools.pairwise(steps[warmup:])]
    parts = {
        f"{'from the last of the warm-up to' if warmup else 'before'} the first measured step": first,
        "between two measured steps": gaps[min(index, len(gaps) - 1)] if gaps else None,
        "after the last": after,
    }
    if max(len(calls or ()) for calls in parts.values()) > 8:
        return ""
    return "; called " + "; ".join(
        f"{where}: {', '.join(calls) or 'nothing'}" for where, calls in parts.items() if calls is not None
    )


def expected_samples(drawn: dict) -> list[float]:
    """Seconds of each measured step: first the host works, then both streams in parallel."""
    rows = zip(drawn["host_s"], drawn["device_s"], drawn["stream_s"], strict=True)
    return [host + max(device, stream) for host, device, stream in rows][drawn["warmup"] :]


def assert_samples(
    got: list[float],
    expected: list[float],
    where: str = "",
    cause: str = "",
    tolerance_s: float = OVERHEAD_S,
    context: Callable[[int], str] = lambda index: "",
) -> None:
    """context(index): returns what was called around this sample, for the message."""
    assert all(map(math.isfinite, got)), f"sample {[*map(math.isfinite, got)].index(False)} of {got} is no time at all"
    errors = [g - e for g, e in zip(got, expected, strict=True)]
    worst = max(range(len(errors)), key=lambda i: abs(errors[i]))
    assert abs(errors[worst]) <= tolerance_s, (
        f"sample {worst} is {show(got[worst])}, the step took {show(expected[worst])}{where}: "
        f"{cause or likely_cause(worst, got, expected)}{context(worst)}"
    )


def likely_cause(index: int, got: list[float], expected: list[float]) -> str:
    if 990 < got[index] / expected[index] < 1010:
        return "a thousand times as much — samples are in seconds, not in milliseconds"
    if max(got) - min(got) < 1e-9 and min(expected) < got[0] < max(expected):
        return "all samples are alike — is there a clock around each step, or one around the loop?"
    for digits in (3, 4):
        if all(abs(g - round(g, digits)) < 1e-12 for g in got):
            return f"every sample is a multiple of {10 ** (3 - digits):g} ms: keep samples as the clock gives them"
    if got[index] < expected[index]:
        return "the clock was read before the device was done — is there a synchronize between step() and the clock?"
    if index == 0:
        return "work of the warm-up is in it — is there a synchronize between the warm-up and the first clock?"
    return "work of another step is in it — does the clock start when the device is idle, right before step()?"


def show(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.3f} ms"


@exercise(BENCHMARK, kind="numerics")
@pytest.mark.parametrize("case", range(3))
def test_each_sample_is_what_its_step_took(run, rng, case):
    check(run, draw_steps(rng, warmup=rng.integers(2, 4), steps=rng.integers(4, 12)))


@exercise(BENCHMARK, kind="numerics")
def test_nothing_of_the_warm_up_is_in_the_first_sample(run, rng):
    drawn = draw_steps(rng, warmup=rng.integers(2, 5), steps=rng.integers(2, 5))
    last = show(drawn["device_s"][drawn["warmup"] - 1])
    check(run, drawn, f" and the last of the warm-up {last}", first=1)


@exercise(BENCHMARK, kind="numerics")
@pytest.mark.parametrize("case", range(2))
def test_the_step_runs_warmup_plus_steps_times(run, rng, case):
    few, many = rng.integers(2, 5), rng.integers(6, 9)  # so that no fixed number of samples is right twice
    drawn = draw_steps(rng, warmup=rng.integers(1, 6), steps=(few, many)[case])
    measure(run, drawn)


@exercise(BENCHMARK, kind="numerics")
@pytest.mark.parametrize("parity", ["odd", "even"])
def test_mean_median_and_standard_deviation_are_of_the_samples(run, rng, parity):
    steps = 2 * rng.integers(2, 4) + (parity == "odd")
    drawn = draw_steps(rng, warmup=rng.integers(1, 4), steps=steps)
    middle = drawn["warmup"] + steps // 2  # the middle sample is the smallest, so the median needs sorting
    drawn["device_s"][middle] = rng.uniform(1e-3, 1.5e-3)
    got = measure(run, drawn)
    assert_samples(got["samples"], expected_samples(drawn))
    for name, (function, what) in STATISTICS.items():
        value = function(got["samples"])
        assert abs(got[name] - value) <= 1e-9 + 1e-6 * value, (
            f"{name} is {show(got[name])}, of these {steps} samples it is {show(value)}: {what}"
        )


STATISTICS = {
    "mean": (statistics.fmean, "the sum of the samples over their count, without the warm-up"),
    "median": (statistics.median, "the middle of the sorted samples, or the mean of the two in the middle"),
    "standard_deviation": (statistics.stdev, "of a sample, so the squares are divided by n - 1"),
}


@exercise(BENCHMARK, kind="numerics")
def test_one_step_without_a_warm_up(run, rng):
    drawn = draw_steps(rng, warmup=0, steps=1)
    got, (expected,) = measure(run, drawn), expected_samples(drawn)
    assert_samples(got["samples"], [expected])
    (sample,) = got["samples"]
    for name, value in {"mean": sample, "median": sample, "standard_deviation": 0.0}.items():
        assert abs(got[name] - value) <= 1e-6 * value, f"{name} is {show(got[name])} of the one sample {show(sample)}"


@exercise(BENCHMARK, kind="numerics")
def test_a_step_is_waited_for_on_every_stream(run, rng):
    drawn = draw_steps(rng, warmup=rng.integers(1, 3), steps=rng.integers(4, 8))
    for call in range(drawn["warmup"], len(drawn["stream_s"]), 2):  # in every other step, the other stream ends last
        drawn["stream_s"][call] = drawn["device_s"][call] + rng.uniform(5e-3, 20e-3)
    drawn["device_s"][drawn["warmup"]] *= rng.integers(0, 1)  # and sometimes the current stream has no work at all
    cause = "wait for the whole device (torch.cuda.synchronize), not for one stream or an event in it"
    check(run, drawn, " with a stream of its own", lambda got: cause)


@exercise(BENCHMARK, kind="numerics")
def test_the_host_s_part_of_a_step_counts(run, rng):
    drawn = draw_steps(rng, warmup=rng.integers(0, 2), steps=rng.integers(3, 6))
    drawn["host_s"][drawn["warmup"] :] = [rng.uniform(2e-3, 20e-3) for _ in range(drawn["steps"])]

    def cause(got: dict) -> str:
        asleep = {"process_time", "thread_time"} & {*got["order"]}
        return f"time.{min(asleep)} stands still while the host sleeps" if asleep else "the clock starts before step()"

    check(run, drawn, " with some of it on the host, before the launch", cause)


@exercise(BENCHMARK, kind="numerics")
def test_a_matrix_product_takes_what_the_roofline_says(run, rng):
    warmup, steps = 1, 3
    shapes = [[128 * rng.integers(4, 7) for _ in range(3)] for _ in range(warmup + steps)]
    got = run(probes.timed_products, shapes, warmup, steps, device="simulated")["samples"]
    assert_samples(got, [product_seconds(*shape) for shape in shapes[warmup:]], tolerance_s=4e-6)


def product_seconds(m: int, k: int, n: int) -> float:
    """Roofline of an A100 in float32: 19.5 TFLOP/s, 2.039 TB/s."""
    return max(2 * m * k * n / 19.5e12, 4 * (m * k + k * n + m * n) / 2.039e12)


@exercise(BENCHMARK, kind="numerics")
@pytest.mark.parametrize(("warmup", "steps"), [(2, 0), (2, -1), (-1, 3)])
def test_impossible_counts_are_refused(run, warmup, steps):
    got = run(probes.refused, warmup, steps, device="simulated")
    assert got["calls"] == 0, f"step() ran {got['calls']} times before the refusal, expected 0: check the counts first"
    assert got["raised"] == "ValueError", (
        f"benchmark(step, warmup={warmup}, steps={steps}) raised {got['raised']}, expected ValueError"
    )


@exercise(BENCHMARK, kind="numerics")
def test_without_a_gpu_it_times_the_cpu(run, rng):
    warmup, host_s = 1, [rng.uniform(1e-3, 5e-3) for _ in range(4)]
    report = run(probes.busy_host, host_s, warmup, len(host_s) - warmup, device="real")
    got = report["samples"]
    assert len(got) == len(host_s) - warmup, f"{len(got)} samples of {len(host_s) - warmup} measured steps"
    for i, (sample, busy_s) in enumerate(zip(got, host_s[warmup:], strict=True)):
        assert sample >= busy_s - 1e-6, (
            f"sample {i} is {show(sample)}, the step kept the CPU busy for {show(busy_s)}: "
            "without a GPU the clock starts before step() and stops after it, in seconds"
        )
    assert sum(got) <= report["seconds"], (
        f"{len(got)} samples sum to {show(sum(got))}, all took {show(report['seconds'])}"
    )


@exercise(BENCHMARK, kind="property")
def test_every_measured_step_begins_on_an_idle_device(run, rng):
    drawn = draw_steps(rng, warmup=rng.integers(1, 4), steps=rng.integers(3, 8))
    busy = measure(run, drawn)["busy"][drawn["warmup"] :]
    assert not any(busy), (
        f"measured step {busy.index(True)} began while the device still worked on the step before: "
        "wait for the device after the warm-up and after each step"
    )


@exercise(BENCHMARK, kind="property")
def test_the_clock_cannot_be_set_back(run, rng):
    order = measure(run, draw_steps(rng, warmup=1, steps=rng.integers(2, 5)))["order"]
    read = {"time", "monotonic", "perf_counter"} & {*order}
    assert read != {"time"}, (
        "steps are timed by time.time(), which jumps when the system's clock is set: use time.perf_counter()"
    )


@exercise(BENCHMARK, kind="property")
def test_the_device_is_done_when_benchmark_returns(run, rng):
    drawn = draw_steps(rng, warmup=rng.integers(0, 3), steps=rng.integers(2, 8))
    assert not measure(run, drawn)["busy_at_the_end"], (
        "benchmark returned while the device still worked on the last step: "
        "a step has ended when the device is done, and only a synchronize tells"
    )


@exercise(BENCHMARK, kind="property")
def test_steps_follow_each_other_without_a_pause(run, rng):
    drawn = draw_steps(rng, warmup=rng.integers(1, 4), steps=rng.integers(3, 8))
    got = measure(run, drawn)
    pauses = got["pauses"][drawn["warmup"] :]
    assert pauses, f"step() ran too few times to follow {drawn['warmup']} (warm-up) + {drawn['steps']} (measured)"
    worst = max(range(len(pauses)), key=pauses.__getitem__)
    measured("longest pause of the device between measured steps", 1e6 * pauses[worst], 1000, "µs", at_most=True)
    assert pauses[worst] < 1e-3, (
        f"the device sat idle for {show(pauses[worst])} between measured steps {worst} and {worst + 1}, "
        "expected less than 1 ms: "
        + (gc_hint(got, drawn) or "nothing slow belongs between steps, or caches and frequencies cool down")
    )
