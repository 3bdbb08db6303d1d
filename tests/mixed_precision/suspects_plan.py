"""What a plan of segments peaks at, and what it is where one thing of it is wrong, so that a message can name it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from lab.judge import harmless

Chain = tuple[list[int], list[int]]  # inputs, saved
Segments = Sequence[int]
ENOUGH = 5  # layers of a chain that is not cut alike by two ways


def starts_of(segments: Segments) -> list[int]:
    return [0, *itertools.accumulate(segments)][:-1]


def by_segment(segments: Segments, inputs: list[int], saved: list[int]) -> dict[str, int]:
    """What is kept while each segment's backward runs: its layers' own, and the inputs of those before it."""
    held, kept = {}, 0
    for start, length in zip(starts_of(segments), segments, strict=True):
        held[f"layers {start} to {start + length - 1}" if length > 1 else f"layer {start}"] = kept + sum(
            saved[start : start + length]
        )
        kept += inputs[start]
    return held


def peak_of(segments: Segments, inputs: list[int], saved: list[int]) -> int:
    return max(by_segment(segments, inputs, saved).values())


@harmless
def of_peaks(chains: Sequence[Chain], got: Sequence[dict]) -> str:
    """What the peaks that were claimed are of the segments that came, in every chain; "" if it is not known."""
    for cause, count in _claims():
        if all(count(g["segments"], *chain) == g["peak"] for chain, g in zip(chains, got, strict=True)):
            return cause
    return ""


@harmless
def of_segments(chains: Sequence[Chain], got: Sequence[dict]) -> str:
    """How the segments that came were cut, in every chain; "" if it is not known."""
    long = [(chain, list(g["segments"])) for chain, g in zip(chains, got, strict=True) if len(chain[1]) >= ENOUGH]
    if not long:
        return ""
    for cause, cut in _cuts():
        if all(cut(*chain) == segments for chain, segments in long):
            return cause.format(layers=len(long[0][0][1]), size=long[0][1][0])
    return ""


def _claims() -> Iterator[tuple[str, Callable[[Segments, list[int], list[int]], int]]]:
    def moments(segments: Segments, inputs: list[int], saved: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """(inputs of segments before, its own input, inputs of those behind, what its layers save) of each."""
        starts = starts_of(segments)
        own = [inputs[start] for start in starts]
        for j, (start, length) in enumerate(zip(starts, segments, strict=True)):
            yield sum(own[:j]), own[j], sum(own[j + 1 :]), sum(saved[start : start + length])

    yield (
        "that is what the layers of the largest segment save, without the inputs of the segments before it",
        lambda *plan: max(together for *_, together in moments(*plan)),
    )
    yield (
        "that is with the inputs of later segments still there: each is freed with its segment",
        lambda *plan: max(before + behind + together for before, _, behind, together in moments(*plan)),
    )
    for rest in ("", ", but of the last"):
        yield (
            f"that is with a segment's own input beside what its layers save{rest}: saved[i] has it in it",
            lambda *plan, rest=rest: max(
                before + together + (0 if rest and i + 1 == len(plan[0]) else own)
                for i, (before, own, _, together) in enumerate(moments(*plan))
            ),
        )
    yield (
        "that is the sum over all segments, not the worst moment",
        lambda *plan: sum(before + together for before, _, _, together in moments(*plan)),
    )


def _cuts() -> Iterator[tuple[str, Callable[[list[int], list[int]], list[int]]]]:
    yield (
        "each layer is a segment of its own, whatever the layers cost",
        lambda inputs, saved: [1] * len(saved),
    )
    yield "nothing is cut, whatever the layers cost", lambda inputs, saved: [len(saved)]
    for rounded in (math.floor, round, math.ceil):
        yield (
            "those are equal segments of √{layers} = {size} layers, whatever the layers cost",
            lambda inputs, saved, rounded=rounded: equal(len(saved), rounded(len(saved) ** 0.5)),
        )


def equal(layers: int, size: int) -> list[int]:
    return [size] * (layers // size) + [layers % size] * bool(layers % size)
