"""Finds patterns in wrong values: where they lie, and how they differ from the expected ones.

A function that returns a separate line begins it with LOOKS. Such a line goes to the top of a message.
`lab.harness.mistakes` ignores it when it compares messages, so we can add patterns without recording mistakes again.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec

import torch

LOOKS = "Looks like: "
P = ParamSpec("P")


def harmless(explain: Callable[P, str]) -> Callable[P, str]:
    """Decorator for functions that explain a failure: return "" if the function itself raises."""

    @functools.wraps(explain)
    def explained(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return explain(*args, **kwargs)
        except Exception:
            return ""

    return explained


def region(wrong: torch.Tensor, names: Sequence[str]) -> str:
    """Describe where wrong values lie along each named dimension; "" if everywhere, or at irregular indices."""
    parts = []
    for dim, name in enumerate(names):
        indices = wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1).any(1).nonzero().flatten().tolist()
        if len(indices) == wrong.shape[dim]:
            continue
        first, last = indices[0], indices[-1]
        span = f"{first} … {last}" if last > first else f"{first}"
        if len(indices) == last - first + 1:
            parts.append(f"{name} {span} of {wrong.shape[dim]}")
        elif (step := indices[1] - first) > 1 and indices == list(range(first, last + 1, step)):
            parts.append(f"one {name} in {step}, from {first} on")
    return f"; all of these at {', '.join(parts)}" if parts else ""


def pattern(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> str:
    """Describe a pattern of all values: not finite, all 0, rounded to 16 bits, times a factor; "" if none fits."""
    if count := int((~torch.isfinite(got)).sum()):
        return f"; {count} of them are not finite"
    if not want.any():
        return ""
    if not got.any():
        return "; all of them are 0" if got.numel() > 1 else ""
    for dtype in (torch.bfloat16, torch.float16):
        ulp = torch.finfo(dtype).eps * float(want.abs().mean())  # a larger error is not only rounding
        rounded = float((got - want).abs().mean()) < 8 * ulp and torch.equal(got.to(dtype).double(), got)
        if rounded and 2 * float(allowed.min()) < ulp:
            return f"; each is a number of {str(dtype)[6:]}: on the way, something was rounded to it"
    factor = float((got * want).sum() / want.square().sum())
    if got.numel() == 1 and min(abs(factor - round(factor)), abs(1 / factor - round(1 / factor))) > 1e-4:
        return ""  # any two single numbers differ by some factor
    fits = ((got - factor * want).abs() <= max(1.0, abs(factor)) * allowed).all()
    if abs(factor) > 1e-3 and abs(factor - 1) > 1e-2 and bool(fits):
        return f"; {'all of them are' if got.numel() > 1 else 'that is'} {factor:.4g} times what is expected"
    return ""


@harmless
def looks_like(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, names: Sequence[str] = ()) -> str:
    """A LOOKS line, if the expected values are reordered, or if the wrong ones are off by one factor or constant.

    "" if there is no such pattern, or if `pattern` already describes all values.
    """
    if not (torch.isfinite(got).all() and got.any() and want.any()) or pattern(got, want, allowed):
        return ""
    text = _order(got, want, allowed, names) or _change(got, want, allowed)
    return f"\n{LOOKS}{text}" if text else ""


def _order(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, names: Sequence[str]) -> str:
    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs() <= float(allowed.max())).all())

    ordered = want.flatten().sort().values
    if got.numel() < 4 or not same(got.flatten().sort().values, ordered):
        return ""
    for dim, size in enumerate(got.shape):
        name = names[dim] if names else f"dimension {dim}"
        for shift in range(1, min(size, 64)):
            if same(got, want.roll(shift, dim)):
                return f"the expected numbers, shifted along {name} by {shift if shift <= size // 2 else shift - size}"
        if same(got, want.flip(dim)):
            return f"the expected numbers, in reverse order along {name}"
    if got.dim() > 1 and same(got.flatten(), want.mT.flatten()):
        return "the expected numbers, transposed in memory"
    # If the expected numbers are closer to each other than the tolerance, any similar numbers would match.
    return "the expected numbers, in another order" if allowed.max() < ordered.diff().median() else ""


@harmless
def row_order(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], what: str) -> str:
    """A LOOKS line that numbers the expected rows (or parts, …), and lists the actual rows by these numbers."""
    kinds: list[torch.Tensor] = []
    for row in want:
        if not any(torch.equal(row, kind) for kind in kinds):
            kinds.append(row)
    actual, expected = (
        [next((str(i) for i, kind in enumerate(kinds) if torch.equal(row, kind)), "?") for row in rows]
        for rows in (got, want)
    )
    if len(actual) > 32 or {*actual} <= {"?"}:
        return ""
    unknown = " (?: none of these)" if "?" in actual else ""
    return f"\n{LOOKS}{what} {' '.join(actual)} where {' '.join(expected)} are expected{unknown}"


def _change(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> str:
    wrong = (got - want).abs() > allowed
    g, w, tolerance = got[wrong], want[wrong], allowed[wrong]
    if len(g) < 3:
        return ""  # two numbers always fit some factor or constant
    if not g.any():
        return "those that are off are all 0"
    factor, offset = float((g * w).sum() / w.square().sum()), float((g - w).mean())
    if abs(factor) > 1e-3 and bool(((g - factor * w).abs() <= max(1.0, abs(factor)) * tolerance).all()):
        return f"those that are off are all {factor:.4g} times what is expected"
    if bool(((g - w - offset).abs() <= tolerance).all()):
        return f"those that are off are all {abs(offset):.4g} {'above' if offset > 0 else 'below'} what is expected"
    return ""


@harmless
def in_parts(got: float, want: float, parts: Mapping[str, float]) -> str:
    """A LOOKS line that explains a wrong count: a part is counted too often or left out, or each part is rounded."""
    excess = got - want
    for name, size in parts.items():
        multiple = abs(excess) / size
        if multiple and 2 * multiple == round(2 * multiple) and multiple <= 4:
            what = name if multiple == 1 else f"{multiple:g} times {name}"
            return f"\n{LOOKS}{abs(excess):,} {'too many' if excess > 0 else 'too few'}, that is {what}"
    if 0 < abs(excess) < 3 and want > 1000:
        return f"\n{LOOKS}off by {abs(excess):g} alone, as where each part is rounded by itself: round once, at the end"
    return ""
