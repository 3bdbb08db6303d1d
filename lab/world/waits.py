# mypy: disable-error-code="method-assign,assignment,attr-defined"
"""Notes when a rank waits for what it has issued: on a Work, or on any future that torch makes of it.

What is noted is patched into torch's classes; no Work and no Future is ever replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import witness
from .ledger import Row, _now

Place = tuple[str, int]  # a conversation, and a number in it
Known = tuple[Row, Place]
_known: weakref.WeakKeyDictionary[Any, Sequence[Known]] = weakref.WeakKeyDictionary()  # by Work or Future


def know(work: dist.Work, row: Row, place: Place) -> None:
    """From here on, who waits for this Work waits for this row."""
    _known[work] = [(row, place)]


def known(work: dist.Work) -> Row | None:
    return _known[work][0][0] if work in _known else None


def install(begin: Callable[[Row, Place], Any], end: Callable[[Any], None]) -> None:
    """Watch all that waits. begin: called with the first that is waited for; end: with what it gave, afterwards."""

    def watched(wait: Callable) -> Callable:
        def call(of: Any, *args: Any, **kwargs: Any) -> Any:
            rows = _known.get(of)
            if not rows:
                return wait(of, *args, **kwargs)
            now = _now()
            for row, _ in rows:
                if row.waited_s < 0:
                    row.waited_s = now
                    witness.tell("waited", row.number, now)
            before = begin(*next((r for r in rows if r[0].returned_s < 0), rows[0]))
            result = wait(of, *args, **kwargs)
            now = _now()
            for row, _ in rows:
                row.returned_s, row.done_s = now, now if row.done_s < 0 else row.done_s
            end(before)
            return result

        return call

    future = torch._C.Future  # torch.futures.Future's own methods call these
    dist.Work.wait = watched(dist.Work.wait)
    dist.Work.get_future = _after(dist.Work.get_future)
    future.wait = watched(future.wait)
    future.then = _after(future.then)
    torch._C._collect_all = _after_all(torch._C._collect_all)


def _after(make: Callable) -> Callable:
    """What a Work or a Future makes is done after it."""

    def call(of: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(of, *args, **kwargs)
        if of in _known:
            _known[made] = _known[of]
        return made

    return call


def _after_all(make: Callable) -> Callable:
    def call(futures: Any) -> Any:
        made = make(futures)
        _known[made] = [row for f in futures for row in _known.get(f, ())]
        return made

    return call
