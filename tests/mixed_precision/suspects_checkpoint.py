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
def graphs(hidden: list[list]) -> str:
    """How often functions ran with autograd on in forward, and whether what these runs made inside is alive."""
    on, off = ([size for was_on, size in hidden if was_on == which] for which in (True, False))
    if not on:
        held = sum(size > 0 for size in off)
        kept = f"what it made inside is alive in {held} of them" if held else "what it made inside is gone"
        return f": all {len(off)} runs in forward had autograd off, and {kept}"
    alive, runs = [size for size in on if size], f"{len(on)} run{'s' * (len(on) > 1)} with autograd on"
    if not alive:
        return f": of {runs} in forward nothing is alive after it"
    left = f"{runs} in forward left a graph that is alive after it, with {sum(alive):,} bytes of hidden activations"
    if not off:
        return f": {left}, as a plain call does"
    return f": {left}: something holds what it returned, beside the result, which was made with autograd off"


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
