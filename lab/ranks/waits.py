# mypy: disable-error-code="method-assign,assignment,attr-defined"
"""Records when a rank waits for an operation that it has issued, or polls it.

What is noted is patched into torch's classes; no Work and no Future is ever replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .ledger import Row, _now

_known: weakref.WeakKeyDictionary[Any, Sequence[Row]] = weakref.WeakKeyDictionary()  # by Work or Future


def know(work: dist.Work, row: Row) -> None:
    """From here on, who waits for this Work waits for this row."""
    _known[work] = [row]


def known(work: dist.Work) -> Row | None:
    return _known[work][0] if work in _known else None


def install(begin: Callable[[Row], None], asked: Callable[[Row], None]) -> None:
    """Watch all that waits, and all that asks whether it would have to.

    begin: called with each row, before it is noted that it is waited for. asked: called with each row that was not
    done when somebody asked.
    """

    def polled(ask: Callable) -> Callable:
        def call(of: Any) -> bool:
            if not (done := ask(of)):
                for row in _known.get(of, ()):
                    asked(row)
            return done

        return call

    def watched(wait: Callable) -> Callable:
        def call(of: Any, *args: Any, **kwargs: Any) -> Any:
            rows = _known.get(of, ())
            for row in rows:
                begin(row)
                row.waited_s = _now() if row.waited_s < 0 else row.waited_s
            result = wait(of, *args, **kwargs)
            for row in rows:
                row.returned_s = _now()
                row.done_s = row.returned_s if row.done_s < 0 else row.done_s
            return result

        return call

    future = torch._C.Future  # torch.futures.Future's own methods call these
    dist.Work.wait = watched(dist.Work.wait)
    dist.Work.is_completed = polled(dist.Work.is_completed)
    future.done = polled(future.done)
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
