"""What a step's counts come to where one thing of them is wrong, so that a message can name the thing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lab.judge import harmless

Counts = tuple[int, ...]  # samples, tokens, and both of all ranks
DEFAULT = -100  # ignore_index
ROWS = ("real", "all")
TOKENS = ("real", "all", "ids above 0")
AMONG = ("all", "last", "first")
OVER = ("sum", "own", "times")


@harmless
def because(cases: Sequence[dict], got: Sequence[Sequence[Counts]], at: int, rank: int) -> str:
    """What gives all that came of the ranks of a group, said of one case and rank; "" if that is not known.

    cases: [case] -> [rank] -> targets, ignore_index; got: [case][rank].
    """
    ways = itertools.product(ROWS, TOKENS, AMONG, OVER, (False, True))
    for way in sorted(ways, key=lambda w: sum(part not in ("real", "sum", False) for part in w) - (w[2] == "all")):
        if all(_counted(ranks, way) == list(map(tuple, have)) for ranks, have in zip(cases, got, strict=True)):
            return _told(cases[at][rank], way, len(cases[at]))
    return ""


def _counted(ranks: Sequence[dict], way: tuple) -> list[Counts]:
    rows, tokens, among, over, default = way
    here = []
    for case in ranks:
        ignored = DEFAULT if default or case["ignore_index"] is None else case["ignore_index"]
        chosen = {"all": case["targets"], "last": case["targets"][-1:], "first": case["targets"][:1]}[among]
        lines = [line for m in chosen for line in m.tolist()]
        counts = {
            "real": sum(t != ignored for line in lines for t in line), "all": sum(map(len, lines)),
            "ids above 0": sum(t > 0 for line in lines for t in line),
        }  # fmt: skip
        samples = len(lines) if rows == "all" else sum(any(t != ignored for t in line) for line in lines)
        here.append((samples, counts[tokens]))
    total = tuple(map(sum, zip(*here, strict=True)))
    of = {
        "sum": lambda mine: total,
        "own": lambda mine: mine,
        "times": lambda mine: tuple(len(ranks) * n for n in mine),
    }[over]
    return [(*mine, *of(mine)) for mine in here]


def _told(case: dict, way: tuple, world: int) -> str:
    rows, tokens, among, over, default = way
    ignored = DEFAULT if case["ignore_index"] is None else case["ignore_index"]
    lines = [line for m in case["targets"] for line in m.tolist()]
    padding = sum(t == ignored for line in lines for t in line)
    empty = sum(all(t == ignored for t in line) for line in lines)
    causes = {
        f"the tokens are numel(): the {padding} targets that are ignore_index, {ignored}, count here": tokens == "all",
        f"the samples are all {len(lines)} rows, with the {empty} of nothing but ignore_index, {ignored}": (
            rows == "all"
        ),
        "only ids above 0 count as tokens: 0 is one too": tokens == "ids above 0",
        f"of {len(case['targets'])} micro-batches the {among} alone counts": among != "all",
        "those of all ranks are this rank's own": over == "own",
        f"those of all ranks are this rank's times {world}: others have other numbers": over == "times",
        f"{DEFAULT} is taken for padding, though ignore_index is given": default,
    }
    return "; ".join(cause for cause, is_so in causes.items() if is_so)


@harmless
def of_messages(sent: Sequence[Sequence[str]], micro_batches: Sequence[int]) -> str:
    """What the messages of each rank tell. sent: [rank] of "operation of elements"."""
    if all(len(s) == n for s, n in zip(sent, micro_batches, strict=True)) and set(micro_batches) != {2}:
        return "; that is one for each micro-batch: add up here first"
    if 2 not in micro_batches and all(s == ["all_reduce of 1"] * 2 for s in sent):
        return "; that is not one for each micro-batch: do samples and tokens travel one by one?"
    return ""
