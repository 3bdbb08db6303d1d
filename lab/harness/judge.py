"""Compares what came back with what was expected, and says where it is worst; decides what was timed."""

from __future__ import annotations

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
    """An assertion that knows what probably caused it; its text ends with the cause.

    looks: what the values look like, a line of `lab.harness.diagnose`.
    """

    def __init__(self, text: str, cause: str = "", looks: str = ""):
        super().__init__((f"{text}: {cause}" if cause else text) + looks)
        self.cause = cause


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    yardstick: torch.Tensor,
    what: str,
    factor: float = 3.0,
    dims: str = "",
    cause: str | Callable[[], str] = "",
    rounded_once: bool = False,
) -> None:
    """Assert that got is want within `factor` times the error of a plain same-dtype computation.

    want: the float64 oracle's; yardstick: what the plain computation in the inputs' dtype gives. Its worst element is
    measured; where that is luckily small, some units in the last place are allowed all the same. cause: what probably
    went wrong, or a function that finds out. rounded_once: of 16-bit values, nearly all must be the nearest to what is
    wanted.
    """
    assert isinstance(got, torch.Tensor), f"{what}: expected a tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        raise Judged(
            f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}", "" if callable(cause) else cause
        )
    if not want.numel():
        return
    got64, want64 = got.double(), want.double()
    error, plain = (got64 - want64).abs(), (yardstick.double() - want64).abs()
    # Of a few dozen float32 values the plain computation may by luck get all right, while another order of the same
    # sums is some ulps off. 16-bit results are float32 sums that are rounded once.
    ulps = 8 if torch.finfo(yardstick.dtype).bits >= 32 else 1
    typical = torch.maximum(want64.abs().mean(), want64.square().mean().sqrt() / 2)  # a few may be much larger
    floor = ulps * torch.finfo(yardstick.dtype).eps * want64.abs().clamp_min(typical)
    allowed = factor * torch.maximum(plain.max(), floor)
    # NaN compares false: not (error <= allowed) catches it where error > allowed would not.
    wrong = ~(error <= allowed)
    if not wrong.any():
        share = torch.nan_to_num(error / allowed, nan=0.0, posinf=0.0).max()  # where nothing is allowed, nothing came
        measured("worst error, in units of what is allowed", float(share), 1, at_most=True)
        if rounded_once:
            _rounded_once(got, want, what)
        return
    flat = int(torch.nan_to_num(error / allowed, nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
    names = [d.strip() for d in dims.split(",")] if len(dims.split(",")) == len(index) and dims else []
    place = f"({', '.join(map(str, index))})" + (f" of ({dims})" if names else "")
    came, expected = apart(float(got64[index]), float(want64[index]))
    raise Judged(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off; worst at {place}: "
        f"got {came}, expected {expected}, allowed ±{float(allowed[index]):.2g}"
        f"{region(wrong, names)}{pattern(got64, want64, allowed)}",
        cause() if callable(cause) else cause,
        looks_like(got64, want64, allowed, names),
    )


def _rounded_once(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Assert that 16-bit values were rounded at the end alone: twice, and a quarter of them are not the nearest."""
    if torch.finfo(got.dtype).bits >= 32:
        return
    off, name = int((got != want.to(got.dtype)).sum()), str(got.dtype)[6:]
    assert off <= max(3, 0.08 * got.numel()), (
        f"{what}: {off} of {got.numel()} values are not the {name} nearest to the exact result, though close to it: "
        f"something was rounded to {name} on the way, compute in float32 and round once at the end"
    )


def callers(value: Any, where: str = "") -> None:
    """Assert that no tensor of the caller has changed, and that a second backward gave the same gradients.

    value: what a probe returned. Any dict in it may have "callers", what `lab.harness.callers.Theirs` has seen.
    """
    if isinstance(value, dict):
        changed, again = value.get("callers", ((), ()))
        assert not changed, (
            f"{' and '.join(changed)} changed{where}: arguments and incoming gradients are the caller's, work in place "
            "on a copy; .contiguous() copies nothing that is contiguous"
        )
        verb, told = "raises" if any("Error: " in each for each in again) else "gives another", " and ".join(again)
        assert not again, (
            f"a second backward over the same graph {verb} {told}{where}: keep what was saved for backward, and work "
            "on a copy of it"
        )
        value = [*value.values()]
    for each in value if isinstance(value, list | tuple) else ():
        if isinstance(each, dict | list | tuple):
            callers(each, where)


def modes(changed: Sequence[str], what: str) -> None:
    """Assert that no module changed its mode. changed: as `lab.harness.modes` found them."""
    assert not changed, (
        f"{changed[0]}: training or evaluation mode is the caller's choice, do not call train() or eval() ({what})"
    )


def apart(got: float, want: float, digits: int = 7) -> tuple[str, str]:
    """Both numbers in as many digits as it takes to see that they differ, and at least `digits`."""
    for more in range(digits, 18):
        texts = f"{got:.{more}g}", f"{want:.{more}g}"
        if texts[0] != texts[1]:
            break
    return texts


def bars(values: Mapping[str, float], unit: str = "") -> str:
    """A picture for the end of a message: a line for each value, with a bar as long as it, the longest of 40 blocks."""
    most, width = max([*values.values(), 1]), max(map(len, values), default=0)
    lines = (f"{name:<{width}}  {'█' * round(40 * value / most)} {value:,} {unit}" for name, value in values.items())
    return "".join("\n  " + line.rstrip() for line in lines)


class Inconclusive(pytest.skip.Exception):  # type: ignore[name-defined]
    """A timed comparison that could not be decided: no points lost, and no pass. pytest shows it as a skip."""


DECIDED: list[str] = []  # what the timed comparisons of the running test said: a test that passes tells its ratio


def timed(
    traces: Sequence[Trace], least_s: float, allowed: float = 1e-5
) -> tuple[list[float], list[float], list[float]]:
    """Times of a world for `compare`: of each pair the slowest rank's, and of b what its ranks waited for a core.

    traces: of ranks whose values are three lists by `interleaved` and the worst error of any repeat. Times are those of
    the judge's clock, where there is a switch. Asserts that every repeat came to the right result, on inputs of its
    own, and that b took what it takes at least: `least_s`.
    """
    for rank, trace in enumerate(traces):
        worst = trace.values[-1]
        assert worst <= allowed, f"rank {rank}: a repeat that was timed came to a wrong result: off by {worst:.3g}"
    a_s, b_s, starved_s = slowest([_taken(trace) for trace in traces])
    assert min(b_s) >= 0.99 * least_s, (
        f"a repeat took {1e3 * min(b_s):.2f} ms; what it is made of sleeps for {1e3 * least_s:.2f} ms"
    )
    return a_s, b_s, [min(starved, b - 0.99 * least_s) for starved, b in zip(starved_s, b_s, strict=True)]


def _taken(trace: Trace) -> list[list[float]]:
    """Seconds of a and b, and those in which b waited for a core."""
    a_s, b_s, starved_s, _ = trace.values
    if trace.gates:
        taken: dict[str, list[float]] = {"a": [], "b": []}
        for begin, end in zip(trace.gates[::2], trace.gates[1::2], strict=True):
            assert (begin.name[2:], end.name) == ("begins", f"{begin.name[0]} ends"), "a measurement lies in another"
            taken[begin.name[0]].append(end.at_s - begin.at_s)
        a_s, b_s = taken["a"], taken["b"]
    return [a_s, b_s, starved_s]


@dataclass(frozen=True)
class Measurement:
    """One number that a test measured, beside the one that was expected: what `lab explain` shows."""

    what: str
    value: float
    expected: float
    unit: str = ""
    at_most: bool = False  # whether less than expected is as good


MEASURED: list[Measurement] = []  # by the running test


def measured(what: str, value: float, expected: float, unit: str = "", at_most: bool = False) -> None:
    """Keep a number for the student to see once the exercise passes. It judges nothing: that is the test's part."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # no number: the test will say so
        MEASURED.append(Measurement(what, float(value), float(expected), unit, at_most))


def keep(kept: dict[str, Measurement], new: Sequence[Measurement]) -> None:
    """Add to what was measured, by what it was: of bounds the one that came nearest, else the last."""
    for m in new:
        before = kept.get(m.what)
        if not (before and m.at_most and before.value * m.expected > m.value * before.expected):
            kept[m.what] = m


def never_holds(
    trace: Trace, small: Trace, what: str, forbidden: int, needs: int, seen: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Assert that a process, whose values are right, never held `forbidden` bytes of `what`. The kernel decides.

    small: the same probe on next to nothing. needs: bytes that may be there beside it, of inputs and results.
    seen: runs the probe again under a meter, and returns its numbers: they explain a failure, and decide nothing.
    """
    if forbidden < 4 * NOISE_BYTES:
        raise ValueError(
            f"{what}: expected at least {4 * NOISE_BYTES:,} bytes, four times the noise, got {forbidden:,}"
        )
    grew, allowed = trace.grew(small), needs + forbidden // 2
    if grew < 0:
        pytest.skip("this system does not say how much memory a process has held")
    measured(f"growth of the process; {what}: {forbidden:,}", grew, allowed, "bytes", at_most=True)
    if grew > allowed:
        raise AssertionError(
            f"the process grew by {grew / 1e6:.0f} MB, expected at most {allowed / 1e6:.0f}: {what} takes "
            f"{forbidden / 1e6:.0f} MB or more; all else needs {needs / 1e6:.1f} MB{_largest(seen)}"
        )


@harmless
def _largest(seen: Callable[[], Mapping[str, Any]]) -> str:
    told = seen()
    where = told["largest_line"] and f" in {told['largest_line']}"
    return f"; torch's largest tensor is {tuple(told['largest_shape'])}, made by {told['largest_op']}{where}"


def decide(comparison: Comparison, what: str, cause: str = "") -> None:
    """Pass where it is "faster", fail where it is "slower", and leave it undecided where the pairs do not tell."""
    DECIDED.append(f"{what}: {comparison}")
    if comparison.verdict == "inconclusive":
        raise Inconclusive(f"inconclusive: {what}: {comparison}")
    if comparison.verdict != "faster":
        raise Judged(f"{what}: {comparison}", cause)
