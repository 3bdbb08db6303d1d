"""How far a batch is: a bar in a terminal, in a log a line a submission; both with the time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, TextColumn

from .batch import seconds_left
from .console import COLUMNS, say
from .report import one_line


@contextlib.contextmanager
def grading(
    total: int, done: int, jobs: int, spent: Sequence[float], console: Console, quiet: bool
) -> Iterator[Callable[[str], None]]:
    """Yields tell(name), to be called as each submission is written down. spent: seconds that earlier ones took."""
    columns, hidden = (*COLUMNS, TextColumn("{task.fields[left]}")), quiet or not console.is_terminal
    began, first = time.monotonic(), done
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        bar = progress.add_task("grading", total=total, completed=done, left=_left(spent, total - done, jobs))

        def tell(name: str) -> None:
            nonlocal done
            done += 1
            # What this session took a submission, all jobs together, is better than what each took for itself.
            left = _left([(time.monotonic() - began) / (done - first)], total - done, 1)
            progress.update(bar, completed=done, description=f"graded {one_line(name, 100)[:30]}", left=left)
            if not quiet and not console.is_terminal:
                say(f"{done} of {total}: {name}{left and f'; {left}'}", console)

        yield tell


def _left(spent: Sequence[float], todo: int, jobs: int) -> str:
    seconds = seconds_left(spent, todo, jobs)
    if seconds is None:
        return ""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"about {f'{hours} h ' if hours else ''}{minutes} min left" if hours or minutes else "a minute left"
