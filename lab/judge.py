"""Compares what came back with what was expected, and says where it is worst; decides what was timed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

from .measure.compare import Comparison, slowest
from .trace import NOISE_BYTES, Trace

PATIENCE_S = 10.0  # with suspects
MANY = 8  # numbers that are not near others by chance

Suspects = Iterator[tuple[str, torch.Tensor]]  # what may be wrong, and what the result then is
T = TypeVar("T")
P = ParamSpec("P")


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    yardstick: torch.Tensor,
    what: str,
    factor: float = 3.0,
    dims: str = "",
    cause: str = "",
    suspects: Callable[[], Suspects] | None = None,
) -> None:
    """Assert that got is want within `factor` times the error of a plain same-dtype computation.

    want: the float64 oracle's; yardstick: what the plain computation in the inputs' dtype gives. Its worst element is
    measured; where that is luckily small, some units in the last place are allowed all the same. suspects: what it
    would mean, and what it then is, the likeliest first: asked for where it is off; the first that is met is told
    instead of the cause.
    """
    assert isinstance(got, torch.Tensor), f"{what}: expected a tensor, got {type(got).__name__}"
    because = f": {cause}" if cause else ""
    assert got.shape == want.shape, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}{because}"
    if not want.numel():
        return
    got64, want64 = got.double(), want.double()
    error, plain = (got64 - want64).abs(), (yardstick.double() - want64).abs()
    # Of a few dozen float32 values the plain computation may by luck get all right, while another order of the same
    # sums is some ulps off. 16-bit results are float32 sums that are rounded once.
    ulps = 8 if torch.finfo(yardstick.dtype).bits >= 32 else 1
    floor = ulps * torch.finfo(yardstick.dtype).eps * want64.abs().clamp_min(want64.abs().mean())
    allowed = factor * torch.maximum(plain.max(), floor)
    # NaN compares false: not (error <= allowed) catches it where error > allowed would not.
    wrong = ~(error <= allowed)
    if not wrong.any():
        share = torch.nan_to_num(error / allowed, nan=0.0, posinf=0.0).max()  # where nothing is allowed, nothing came
        measured("worst error, in units of what is allowed", float(share), 1, at_most=True)
        return
    flat = int(torch.nan_to_num(error / allowed, nan=torch.inf).argmax())
    because = _met(got64, want64, allowed, suspects) or because
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
    names = [d.strip() for d in dims.split(",")] if len(dims.split(",")) == len(index) and dims else []
    place = f"({', '.join(map(str, index))})" + (f" of ({dims})" if names else "")
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off; worst at {place}: "
        f"got {got64[index]:.7g}, expected {want64[index]:.7g}, allowed ±{float(allowed[index]):.2g}"
        f"{_region(wrong, names)}{_pattern(got64, want64, allowed)}{because}"
    )


def harmless(explain: Callable[P, str]) -> Callable[P, str]:
    """A decorator of what explains a failure: "" where that itself goes wrong, since the message is worth more."""

    @functools.wraps(explain)
    def explained(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return explain(*args, **kwargs)
        except Exception:
            return ""

    return explained


@harmless
def _met(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, suspects: Callable[[], Suspects] | None) -> str:
    tried = in_time(suspects()) if suspects else ()
    return next((f": {cause}" for cause, tensor in tried if _meets(got, want, tensor, allowed)), "")


def in_time(suspects: Iterable[T]) -> Iterator[T]:
    """Those that are there within PATIENCE_S: whoever waits for a message would rather have it without a cause."""
    end = time.monotonic() + PATIENCE_S
    for suspect in suspects:
        yield suspect
        if time.monotonic() > end:
            return


def _meets(got: torch.Tensor, want: torch.Tensor, suspect: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Whether that explains it: what is left is about what is allowed, and a tenth of what was off at most.

    Or, of more numbers than are alike by chance, a hundredth of what was off.
    """
    finite = torch.isfinite(got)
    if got.shape != suspect.shape or not torch.equal(finite, torch.isfinite(suspect)):
        return False
    if not finite.any():
        return True
    left, off = (got - suspect.double())[finite].abs(), (got - want)[finite].abs().max()
    if left.numel() >= MANY and left.max() <= off / 100:
        return True
    return bool((left <= 4 * allowed[finite]).all() and left.max() <= off / 10)


def _region(wrong: torch.Tensor, names: Sequence[str]) -> str:
    """Where all that is off lies, if it is a part: indices of dimensions that have a name."""
    told = []
    for dim, name in enumerate(names):
        hit = wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1).any(1).nonzero().flatten().tolist()
        if len(hit) == wrong.shape[dim]:
            continue
        first, last = hit[0], hit[-1]
        whole = f"{first} … {last}" if last > first else f"{first}"
        if len(hit) == last - first + 1:
            told.append(f"{name} {whole} of {wrong.shape[dim]}")
        elif (step := hit[1] - first) > 1 and hit == list(range(first, last + 1, step)):
            told.append(f"one {name} in {step}, from {first} on")
    return f"; all of these at {', '.join(told)}" if told else ""


def _pattern(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> str:
    """What all values show together, where they do: a factor that was forgotten, zeros, what is no number."""
    if odd := int((~torch.isfinite(got)).sum()):
        return f"; {odd} of them are not finite"
    if not want.any():
        return ""
    if not got.any():
        return "; all of them are 0" if got.numel() > 1 else ""
    for dtype in (torch.bfloat16, torch.float16):
        ulp = torch.finfo(dtype).eps * float(want.abs().mean())  # whoever is off by many was not only rounded
        rounded = float((got - want).abs().mean()) < 8 * ulp and torch.equal(got.to(dtype).double(), got)
        if rounded and 2 * float(allowed.min()) < ulp:
            return f"; each is a number of {str(dtype)[6:]}: on the way, something was rounded to it"
    factor = float((got * want).sum() / want.square().sum())
    if got.numel() == 1 and min(abs(factor - round(factor)), abs(1 / factor - round(1 / factor))) > 1e-4:
        return ""  # any number is some other one times a factor
    near = ((got - factor * want).abs() <= max(1.0, abs(factor)) * allowed).all()
    if abs(factor) > 1e-3 and abs(factor - 1) > 1e-2 and bool(near):
        return f"; {'all of them are' if got.numel() > 1 else 'that is'} {factor:.4g} times what is expected"
    return ""


def bars(values: Mapping[str, float], unit: str = "") -> str:
    """A picture for the end of a message: a line for each value, with a bar as long as it, the longest of 40 blocks."""
    most, width = max([*values.values(), 1]), max(map(len, values), default=0)
    lines = (f"{name:<{width}}  {'█' * round(40 * value / most)} {value:,} {unit}" for name, value in values.items())
    return "".join("\n  " + line.rstrip() for line in lines)


class Inconclusive(pytest.skip.Exception):  # type: ignore[name-defined]
    """A timed comparison that could not be decided: no points lost, and no pass. pytest shows it as a skip."""


DECIDED: list[str] = []  # what the timed comparisons of the running test said: a test that passes tells its ratio


def timed(
    ranks: Sequence[tuple], least_s: float, allowed: float = 1e-5
) -> tuple[list[float], list[float], list[float]]:
    """Times of a world for `compare`: of each pair the slowest rank's, and of b what its ranks waited for a core.

    ranks: what each gives: three lists by `interleaved`, and the worst error of any repeat. Asserts that every repeat
    came to the right result, on inputs of its own, and that b took what it takes at least: `least_s`.
    """
    for rank, (*_, worst) in enumerate(ranks):
        assert worst <= allowed, f"rank {rank}: a repeat that was timed came to a wrong result: off by {worst:.3g}"
    a_s, b_s, starved_s = slowest([lists for *lists, _ in ranks])
    assert min(b_s) >= 0.99 * least_s, (
        f"a repeat took {1e3 * min(b_s):.2f} ms; what it is made of sleeps for {1e3 * least_s:.2f} ms"
    )
    return a_s, b_s, [min(starved, b - 0.99 * least_s) for starved, b in zip(starved_s, b_s, strict=True)]


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
    trace: Trace, small: Trace, what: str, forbidden: int, needs: int, seen: Callable[[], Mapping[str, Any]]
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
    assert comparison.verdict == "faster", f"{what}: {comparison}" + (f": {cause}" if cause else "")
