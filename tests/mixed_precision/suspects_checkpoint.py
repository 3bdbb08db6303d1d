"""What differed between a checkpointed call and the plain one beside their results: what a message can tell of it.

By what probes_memory.run_part saw: how often the function ran, with what, and what became of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lab.judge import harmless

ARGUMENTS = {"x": "x", "scale": "the positional tensor", "shift": "the keyword tensor"}


@harmless
def of(got: dict, want: dict) -> str:
    """What the function was given, and left, otherwise than in the plain call: begins with ": ", "" if nothing."""
    told = [*_dropout(got["seen"], want["seen"]), *_dtypes(got["calls"]), *_needs(got["seen"], want["seen"])]
    told += _given(got["given"], want["given"])
    return ": " + "; ".join(told) if told else ""


@harmless
def ratio(got: Tensor, want: Tensor) -> str:
    """Where every value is the same number of times the plain call's, or all are 0."""
    if not got.any():
        return "every value is 0"
    factor = float((got * want).sum() / want.square().sum())
    near = (got - factor * want).abs().max() <= 1e-5 * got.abs().max()
    return f"every value is {factor:.4g} times the plain call's" if near else ""


def _dropout(got: list[dict], want: list[dict]) -> Iterator[str]:
    plain = [call["left"] for call in want]
    for on, when in ((False, "forward"), (True, "the recomputation")):
        calls = [call["left"] for call in got if call["on"] == on]
        others = [min(int((left != p).sum()) for p in plain if p.shape == left.shape) for left in calls]
        if any(others):
            yield f"in {when} dropout zeroed others than in the plain call: {max(others)} of {calls[0].numel()} differ"


def _dtypes(calls: list[list]) -> Iterator[str]:
    first, again = ([dtype.removeprefix("torch.") for was_on, dtype in calls if was_on == on] for on in (False, True))
    if first and again and set(first) != set(again):
        yield f"forward computed in {', '.join(dict.fromkeys(first))}, the recomputation in {again[0]}"


def _needs(got: list[dict], want: list[dict]) -> Iterator[str]:
    plain = [call["needs"] for call in want]
    for call in got:
        if call["on"] and call["needs"] not in plain:
            yield (
                f"requires_grad as the function sees it: in the plain call {_seen(plain[0])}, in the recomputation "
                f"{_seen(call['needs'])}"
            )
            return
    if not any(call["on"] for call in got):
        yield "the function never ran with autograd on"


def _seen(needs: dict[str, bool]) -> str:
    return ", ".join(f"{ARGUMENTS[name]} {'yes' if need else 'no'}" for name, need in needs.items())


def _given(got: list[int], want: list[int]) -> Iterator[str]:
    for name, times, plain in zip(ARGUMENTS.values(), got, want, strict=True):
        if times > plain:
            yield (
                f"one backward put a gradient into {name} {times} times, in the plain call {plain}: the graph that the "
                f"recomputation makes goes on to {name} itself"
            )
