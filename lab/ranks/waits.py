# mypy: disable-error-code="method-assign,assignment,attr-defined"
"""Notices when a rank waits for, or polls, an operation that it has issued.

It patches the methods of torch's Work and Future classes. The objects themselves stay torch's own.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .ledger import Row

_known: weakref.WeakKeyDictionary[Any, Sequence[Row]] = weakref.WeakKeyDictionary()  # by Work or Future


def know(work: dist.Work, row: Row) -> None:
    """Remember that this Work belongs to this row."""
    _known[work] = [row]


def known(work: dist.Work) -> Row | None:
    return _known[work][0] if work in _known else None


def install(begin: Callable[[Row], None], asked: Callable[[Row], None], ended: Callable[[Row], None]) -> None:
    """Patch torch's methods that wait for an operation, and those that poll it.

    begin: called with each row when a wait begins. asked: called with each row that was polled and was not done. ended:
    called with each row when the wait has ended; may raise the operation's error.
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
            result = wait(of, *args, **kwargs)
            for row in rows:
                ended(row)
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
    """Give a Future that is made from a Work or Future the same rows."""

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
