"""Compares values with expected ones, and names the worst element; decides timed comparisons."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from .compare import Comparison, slowest
from .diagnose import harmless, looks_like, pattern, region
from .trace import NOISE_BYTES, Trace


class Judged(AssertionError):
    """An AssertionError whose text ends with its probable cause, and then `looks`: a line of lab.harness.diagnose."""

    def __init__(self, text: str, cause: str = "", looks: str = ""):
        super().__init__((f"{text}: {cause}" if cause else text) + looks)
        self.cause = cause


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    plain_result: torch.Tensor,
    what: str,
    factor: float = 3.0,
    dims: str = "",
    cause: str | Callable[[], str] = "",
    rounded_once: bool = False,
    usual: float = 0.0,
) -> None:
    """Assert that `got` equals `want` within `factor` times the error of a plain computation in the inputs' dtype.

    want: the float64 oracle's values. plain_result: the plain computation's values. The tolerance is `factor` times
    their largest error, or times some units in the last place if that error happens to be smaller. usual: the plain
    computation's usual relative error. We assume at least this error, since few values may have a small one by luck.
    cause: probable mistake, or a function that finds it. rounded_once: also assert that nearly all 16-bit values are
    the nearest to `want`.
    """
    assert isinstance(got, torch.Tensor), f"{what}: expected a tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        raise Judged(
            f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}", "" if callable(cause) else cause
        )
    if not want.numel():
        return
    got64, want64 = got.double(), want.double()
    error, plain_error = (got64 - want64).abs(), (plain_result.double() - want64).abs()
    # With few float32 values, the plain computation may happen to be exact, while the same sums in another order are
    # some units in the last place (ulps) off. A 16-bit result is a float32 sum that is rounded once.
    ulps = 8 if torch.finfo(plain_result.dtype).bits >= 32 else 1
    typical = torch.maximum(want64.abs().mean(), want64.square().mean().sqrt() / 2)  # a few values may be much larger
    floor = ulps * torch.finfo(plain_result.dtype).eps * want64.abs().clamp_min(typical)
    minimum = usual * float(typical) if usual else 0.0
    allowed = factor * torch.maximum(plain_error.max(), floor).clamp_min(minimum)
    # A NaN compares as false, so not (error <= allowed) catches it, and error > allowed would not.
    wrong = ~(error <= allowed)
    if not wrong.any():
        share = torch.nan_to_num(error / allowed, nan=0.0, posinf=0.0).max()  # 0 / 0: the error is 0
        measured("worst error, in units of what is allowed", float(share), 1, at_most=True)
        if rounded_once:
            _rounded_once(got, want, what)
        return
    flat = int(torch.nan_to_num(error / allowed, nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
    names = [d.strip() for d in dims.split(",")] if len(dims.split(",")) == len(index) and dims else []
    position = f"({', '.join(map(str, index))})" + (f" of ({dims})" if names else "")
    actual, expected = distinct_digits(float(got64[index]), float(want64[index]))
    raise Judged(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off; worst at {position}: "
        f"got {actual}, expected {expected}, allowed ±{float(allowed[index]):.2g}"
        f"{region(wrong, names)}{pattern(got64, want64, allowed)}",
        cause() if callable(cause) else cause,
        looks_like(got64, want64, allowed, names),
    )


def _rounded_once(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Assert that 16-bit values were rounded only at the end: rounding twice makes a quarter of them inexact."""
    if torch.finfo(got.dtype).bits >= 32:
        return
    count, name = int((got != want.to(got.dtype)).sum()), str(got.dtype)[6:]
    assert count <= max(3, 0.08 * got.numel()), (
        f"{what}: {count} of {got.numel()} values are not the {name} nearest to the exact result, though close to it: "
        f"something was rounded to {name} on the way, compute in float32 and round once at the end"
    )


def check_callers_unchanged(value: Any, where: str = "") -> None:
    """Assert that no tensor of the caller has changed, and that a second backward gave the same gradients.

    value: a probe's return value. A dict in it may have an entry "callers": the result of `CallerTensors.seen`.
    """
    if isinstance(value, dict):
        changed, second = value.get("callers", ((), ()))
        assert not changed, (
            f"{' and '.join(changed)} changed{where}: arguments and incoming gradients are the caller's, work in place "
            "on a copy; .contiguous() copies nothing that is contiguous"
        )
        verb, names = "raises" if any("Error: " in each for each in second) else "gives another", " and ".join(second)
        assert not second, (
            f"a second backward over the same graph {verb} {names}{where}: keep what was saved for backward, and work "
            "on a copy of it"
        )
        value = [*value.values()]
    for each in value if isinstance(value, list | tuple) else ():
        if isinstance(each, dict | list | tuple):
            check_callers_unchanged(each, where)


def modes(changed: Sequence[str], what: str) -> None:
    """Assert that no module changed its mode. changed: messages of `lab.harness.modes`."""
    assert not changed, (
        f"{changed[0]}: training or evaluation mode is the caller's choice, do not call train() or eval() ({what})"
    )


def distinct_digits(got: float, want: float, digits: int = 7) -> tuple[str, str]:
    """Format both numbers with enough digits to see that they differ, at least `digits`."""
    for precision in range(digits, 18):
        texts = f"{got:.{precision}g}", f"{want:.{precision}g}"
        if texts[0] != texts[1]:
            break
    return texts


def bars(values: Mapping[str, float], unit: str = "") -> str:
    """A bar chart for the end of a message: a line per value; the longest bar has 40 blocks."""
    longest, width = max([*values.values(), 1]), max(map(len, values), default=0)
    lines = (f"{name:<{width}}  {'█' * round(40 * value / longest)} {value:,} {unit}" for name, value in values.items())
    return "".join("\n  " + line.rstrip() for line in lines)


class Inconclusive(pytest.skip.Exception):  # type: ignore[name-defined]
    """A timed comparison was undecided: the test does not pass, but costs no points. pytest shows it as a skip."""


TIMING_MESSAGES: list[str] = []  # messages of the running test's timed comparisons; shown even if the test passes


def timed(
    traces: Sequence[Trace], least_s: float, allowed: float = 1e-5, baseline: Sequence[Trace] = ()
) -> tuple[list[float], list[float], list[float]]:
    """Combine the ranks' times for `compare`: the slowest rank's time in each pair, and b's waits for a core.

    a is the baseline, b the code under test. traces: each rank returned the three lists of `interleaved`, and the
    largest error of any repeat. baseline: ranks that measured a, if `traces` measured b alone. With a switch, times are
    measured by its clock. Asserts that no error exceeds `allowed`, and that b never took less than 99 % of `least_s`.
    """
    for rank, trace in enumerate([*traces, *baseline]):
        worst = trace.values[-1]
        assert worst <= allowed, f"rank {rank}: a repeat that was timed came to a wrong result: off by {worst:.3g}"
    a_s, b_s, starved_s = slowest([_times(trace) for trace in traces])
    if baseline:
        a_s, _, _ = slowest([_times(trace) for trace in baseline])
    assert min(b_s) >= 0.99 * least_s, (
        f"a repeat took {1e3 * min(b_s):.2f} ms; what it is made of sleeps for {1e3 * least_s:.2f} ms"
    )
    return a_s, b_s, [min(starved, b - 0.99 * least_s) for starved, b in zip(starved_s, b_s, strict=True)]


def _times(trace: Trace) -> list[list[float]]:
    """Return three lists of seconds, per pair: of a, of b, and in which b waited for a core."""
    a_s, b_s, starved_s, _ = trace.values
    if trace.gates:
        times: dict[str, list[float]] = {"a": [], "b": []}
        for begin, end in zip(trace.gates[::2], trace.gates[1::2], strict=True):
            assert begin.name.replace("begins", "ends") == end.name != begin.name, "a measurement lies in another"
            times[begin.name[0]].append(end.at_s - begin.at_s)
        a_s, b_s = times["a"], times["b"]
    return [a_s, b_s, starved_s]


@dataclass(frozen=True)
class Measurement:
    """A number that a test measured, and the expected one. `lab explain` shows both."""

    what: str
    value: float
    expected: float
    unit: str = ""
    at_most: bool = False  # whether `expected` is an upper bound


MEASURED: list[Measurement] = []  # measurements of the running test


def measured(what: str, value: float, expected: float, unit: str = "", at_most: bool = False) -> None:
    """Record a number to show to the student once the exercise passes. The test judges it, not this function."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # not a number: the test will report it
        MEASURED.append(Measurement(what, float(value), float(expected), unit, at_most))


def keep(kept: dict[str, Measurement], new: Sequence[Measurement]) -> None:
    """Add new measurements to those kept. If a name repeats, keep the nearest to its upper bound, or else the last."""
    for m in new:
        known = kept.get(m.what)
        if not (known and m.at_most and known.value * m.expected > m.value * known.expected):
            kept[m.what] = m


def never_holds(
    trace: Trace, tiny: Trace, what: str, forbidden_bytes: int, needs: int, seen: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Assert that a process never held `forbidden_bytes` of `what`, by its memory peak. Judge its values first.

    The kernel measures the peak. tiny: trace of the same probe on tiny inputs. needs: bytes of inputs and results,
    which are allowed. seen: runs the probe again under a meter, and returns the meter's numbers to explain a failure.
    """
    if forbidden_bytes < 4 * NOISE_BYTES:
        raise ValueError(
            f"{what}: expected at least {4 * NOISE_BYTES:,} bytes, four times the noise, got {forbidden_bytes:,}"
        )
    grew, allowed = trace.grew(tiny), needs + forbidden_bytes // 2
    if grew < 0:
        pytest.skip("this system does not say how much memory a process has held")
    measured(f"growth of the process; {what}: {forbidden_bytes:,}", grew, allowed, "bytes", at_most=True)
    if grew > allowed:
        raise AssertionError(
            f"the process grew by {grew / 1e6:.0f} MB, expected at most {allowed / 1e6:.0f}: {what} takes "
            f"{forbidden_bytes / 1e6:.0f} MB or more; all else needs {needs / 1e6:.1f} MB{_largest(seen)}"
        )


@harmless
def _largest(seen: Callable[[], Mapping[str, Any]]) -> str:
    report = seen()
    where = report["largest_line"] and f" in {report['largest_line']}"
    return f"; torch's largest tensor is {tuple(report['largest_shape'])}, made by {report['largest_op']}{where}"


def decide(comparison: Comparison, what: str, cause: str = "") -> None:
    """Pass if the verdict is "faster", fail if it is "slower", otherwise raise Inconclusive."""
    TIMING_MESSAGES.append(f"{what}: {comparison}")
    if comparison.verdict == "inconclusive":
        raise Inconclusive(f"inconclusive: {what}: {comparison}")
    if comparison.verdict != "faster":
        raise Judged(f"{what}: {comparison}", cause)
