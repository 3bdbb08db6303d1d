# mypy: disable-error-code="method-assign,assignment,attr-defined"
"""Notices when a rank waits for, or polls, an operation that it has issued.

It patches methods of torch's Work and Future classes, so the objects are still torch's own.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .ledger import Row

_known: weakref.WeakKeyDictionary[Any, Sequence[Row]] = weakref.WeakKeyDictionary()  # by Work or Future


def remember(work: dist.Work, row: Row) -> None:
    """Remember that this Work belongs to this row."""
    _known[work] = [row]


def row_of(work: dist.Work) -> Row | None:
    return _known[work][0] if work in _known else None


def install(on_begin: Callable[[Row], None], on_poll: Callable[[Row], None], on_end: Callable[[Row], None]) -> None:
    """Patch torch's methods that wait for an operation, and those that poll it.

    Each function is called with the row of the operation. on_begin: a wait begins. on_poll: a poll found the operation
    unfinished. on_end: a wait has ended; this function may raise the operation's error.
    """

    def polled(poll: Callable) -> Callable:
        def call(work: Any) -> bool:
            if not (done := poll(work)):
                for row in _known.get(work, ()):
                    on_poll(row)
            return done

        return call

    def watched(wait: Callable) -> Callable:
        def call(work: Any, *args: Any, **kwargs: Any) -> Any:
            rows = _known.get(work, ())
            for row in rows:
                on_begin(row)
            result = wait(work, *args, **kwargs)
            for row in rows:
                on_end(row)
            return result

        return call

    future = torch._C.Future  # torch.futures.Future's own methods call these
    dist.Work.wait = watched(dist.Work.wait)
    dist.Work.is_completed = polled(dist.Work.is_completed)
    future.done = polled(future.done)
    dist.Work.get_future = _inherit_rows(dist.Work.get_future)
    future.wait = watched(future.wait)
    future.then = _inherit_rows(future.then)
    torch._C._collect_all = _inherit_all_rows(torch._C._collect_all)


def _inherit_rows(make: Callable) -> Callable:
    """Wrap a function that makes a Future from a Work or Future, so that the new Future belongs to the same rows."""

    def call(source: Any, *args: Any, **kwargs: Any) -> Any:
        future = make(source, *args, **kwargs)
        if source in _known:
            _known[future] = _known[source]
        return future

    return call


def _inherit_all_rows(make: Callable) -> Callable:
    def call(futures: Any) -> Any:
        future = make(futures)
        _known[future] = [row for f in futures for row in _known.get(f, ())]
        return future

    return call
