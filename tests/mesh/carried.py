"""Runs probes, and joins the values of ranks with the messages that the switch carried."""

from collections.abc import Callable, Sequence
from typing import Any

from lab.harness.judge import never_holds
from lab.harness.trace import sends

BOTH = ("forward", "backward")
TWICE = (*BOTH, "again")  # a second backward over the same graph


def traced(run: Any, probe: Callable, *args: Any, parts: Sequence[str] = TWICE, **options: Any) -> list:
    """Run a probe; return each rank's value: one dict, or a list with one dict per case.

    Each dict also has "sent", the switch's rows of messages per part, and "files" of the ranks' folder. parts: the
    gates that the probe asks for in each case, in this order. A part ends where the next one begins. Without a world
    there is no switch, and nothing is sent.
    """
    ranks = []
    for trace in run.trace(probe, *args, **options):
        value = trace.values
        cases = value if isinstance(value, list) else [value] if value else []
        names = [*parts] * len(cases)
        rows = iter(trace.cut(names) if options.get("world") else [[] for _ in names])
        joined = [{**case, "sent": {part: next(rows) for part in parts}, "files": trace.files} for case in cases]
        ranks.append(joined[0] if isinstance(value, dict) and joined else joined or value)
    return ranks


def check_sends(ranks: list, want: dict[str, list], what: str = "", cause: str = "", fields=("op", "elements")) -> None:
    """Assert that every rank sent these messages in each part. Only `fields` are compared."""
    for rank, got in enumerate(ranks):
        for part, rows in want.items():
            sends(got["sent"][part], rows, f"{what}rank {rank}, {part}", cause, fields)


def check_no_growth(
    run: Any, probe: Callable, cases: list, judge: Callable, what: str, forbidden: int, limit: int, **options: Any
) -> None:
    """Assert that a rank's memory peak in a large case is about that in a small one, by the kernel's counters.

    cases: (world, arguments) of a tiny, a small and a large case. judge(values, *arguments): asserts that the values
    are right. forbidden: bytes of `what`, only in the large case. limit: bytes that a rank of the small case may take.
    """
    (tiny, *_), small, large = (run.trace(probe, *args, world=world, **options) for world, args in cases)
    for traces, (_, args) in zip((small, large), cases[1:], strict=True):
        judge([trace.values for trace in traces], *args)
    needed = min(max(trace.grew(tiny) for trace in small), limit)
    for rank, trace in enumerate(large):
        never_holds(trace, tiny, f"rank {rank} of {len(large)}: {what}", forbidden, needed)
