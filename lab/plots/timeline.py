"""Draws timelines: two rows of bars per rank.

A rank's upper bars show its compute, the lower bars its messages. Where only the lower row has a bar, the rank waits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..cluster.simulator import SPANS as KINDS
from ..cluster.simulator import Span
from . import COLOURS, HATCHES, INK, handles

*_, MESSAGE = KINDS
_LOOKS = dict(zip(KINDS, zip(COLOURS.values(), HATCHES, strict=True), strict=False))
_UNITS = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
_PIXELS = 2  # if the gap is smaller, spans share one bar, with a tick where each begins

Ranks = Sequence[Sequence[Span]]


def timelines(panels: Mapping[str, Ranks], unit_s: float = 1e-3, width: float = 9) -> Any:
    """Return a figure `width` inches wide: one panel per timeline, one below the other on the same time axis."""
    from matplotlib import pyplot

    spans = [s for ranks in panels.values() for rank in ranks for s in rank]
    rows = [max(len(ranks), 1) for ranks in panels.values()]
    row_height = max(0.3, 0.55 - 0.03 * max(rows, default=1))  # inches per rank
    size = (width, 0.6 + sum(0.45 + row_height * n for n in rows))
    figure, all_axes = pyplot.subplots(
        len(rows), 1, figsize=size, dpi=100, sharex=True, squeeze=False, height_ratios=rows, layout="constrained"
    )
    looks = {kind: _LOOKS[kind] for kind in KINDS if any(s.kind == kind for s in spans)}
    figure.legend(handles=handles(looks), loc="outside upper center", ncols=4, frameon=False)
    figure.draw_without_rendering()  # so that widths in pixels are known
    for axes, (name, ranks) in zip(all_axes[:, 0], panels.items(), strict=True):
        _timeline(axes, ranks, name, 1.02 * max((s.end_s for s in spans), default=1.0), unit_s)
    axes.set_xlabel(_UNITS[unit_s])
    return figure


def _timeline(axes: Any, ranks: Ranks, title: str, width_s: float, unit_s: float) -> None:
    last_s = max((s.end_s for rank in ranks for s in rank), default=0.0)
    length = f"{last_s / unit_s:.1f} {_UNITS[unit_s]}"
    axes.set(title=f"{title}: {length}", xlim=(0, width_s / unit_s), ylim=(len(ranks) - 0.4, -0.6))
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in range(len(ranks))])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.4, color="0.85")
    axes.set_axisbelow(True)
    pixel_s = width_s / max(axes.get_window_extent().width, 1)
    for y, rank in enumerate(ranks):
        for kind in KINDS:
            top, height = (y + 0.06, 0.34) if kind == MESSAGE else (y - 0.4, 0.44)
            _draw(axes, kind, [s for s in rank if s.kind == kind], (top, height), pixel_s, unit_s)
    axes.axvline(last_s / unit_s, color=INK, linewidth=0.8, linestyle="--")


def _draw(
    axes: Any, kind: str, spans: Sequence[Span], y_range: tuple[float, float], pixel_s: float, unit_s: float
) -> None:
    """Draw spans of one kind. Spans that nearly touch form one bar, with ticks where they begin if there is room."""
    bars: list[list[float]] = []
    ticks = [-math.inf]
    for span in sorted(spans, key=lambda s: s.start_s):
        if not bars or span.start_s >= bars[-1][1] + _PIXELS * pixel_s:
            bars.append([span.start_s, span.end_s])
            continue
        bars[-1][1] = max(bars[-1][1], span.end_s)
        if span.start_s - ticks[-1] >= 2 * _PIXELS * pixel_s:
            ticks.append(span.start_s)
    colour, hatch = _LOOKS[kind]
    segments = [(start / unit_s, max(end - start, pixel_s) / unit_s) for start, end in bars]
    axes.broken_barh(segments, y_range, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
    axes.vlines([tick / unit_s for tick in ticks[1:]], y_range[0], sum(y_range), color="black", linewidth=0.5)
