"""Runs probes, and joins the values of ranks with the messages that the switch carried."""

from collections.abc import Callable, Sequence
from typing import Any

from lab.harness.judge import never_holds
from lab.harness.trace import sends

BOTH = ("forward", "backward")
TWICE = (*BOTH, "again")  # a second backward over the same graph


def asked(run: Any, probe: Callable, *args: Any, parts: Sequence[str] = TWICE, **options: Any) -> list:
    """Run a probe; return each rank's value, one dict, or a list of dicts for cases. Each dict also has "sent": by
    part, the rows of the messages that the switch carried; and "files" of the ranks' folder.

    parts: the gates that the probe asks for in each case, in this order. A part ends where the next one begins. A
    process without a world has no switch and sends nothing.
    """
    ranks = []
    for trace in run.trace(probe, *args, **options):
        given = trace.values
        cases = given if isinstance(given, list) else [given] if given else []
        names = [*parts] * len(cases)
        rows = iter(trace.cut(names) if options.get("world") else [[] for _ in names])
        told = [{**case, "sent": {part: next(rows) for part in parts}, "files": trace.files} for case in cases]
        ranks.append(told[0] if isinstance(given, dict) and told else told or given)
    return ranks


def all_send(ranks: list, want: dict[str, list], what: str = "", cause: str = "", fields=("op", "elements")) -> None:
    """Assert that every rank sent these messages in each part; compares only these fields."""
    for rank, got in enumerate(ranks):
        for part, rows in want.items():
            sends(got["sent"][part], rows, f"{what}rank {rank}, {part}", cause, fields)


def does_not_grow(
    run: Any, probe: Callable, cases: list, judge: Callable, what: str, forbidden: int, most: int, **options: Any
) -> None:
    """Assert that a rank's memory in the last of three cases is about that in the second, by the kernel's counters.

    cases: (world, arguments) of a tiny, a small and a large case. judge(values, *arguments): asserts that the values
    are right. forbidden: the bytes of `what`, which only the large case has. most: the bytes that a rank of the small
    case may take.
    """
    (little, *_), few, many = (run.trace(probe, *args, world=world, **options) for world, args in cases)
    for traces, (_, args) in zip((few, many), cases[1:], strict=True):
        judge([trace.values for trace in traces], *args)
    needs = min(max(trace.grew(little) for trace in few), most)
    for rank, trace in enumerate(many):
        never_holds(trace, little, f"rank {rank} of {len(many)}: {what}", forbidden, needs)
