"""Draws timelines: two rows of bars per rank.

A rank's upper bars show its compute, the lower bars its messages. Where only the lower row has a bar, the rank waits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cluster.simulator import SPANS as KINDS
from ..cluster.simulator import Span
from ..ranks.ledger import readable
from . import COLOURS, HATCHES, Picture, handles, table

*_, MESSAGE = KINDS
_LOOKS = dict(zip(KINDS, zip(COLOURS.values(), HATCHES, strict=True), strict=False))
_PIXELS = 2  # spans with a smaller gap are drawn as one bar, with a tick where each begins


Ranks = Sequence[Sequence[Span]]


def timeline(
    axes: Any, ranks: Ranks, title: str, end_s: float | None = None, legend: bool = True, unit_s: float = 1e-3
) -> Picture:
    """Draw a timeline on matplotlib axes, from 0 to end_s (default: a little after the last end), in unit_s."""
    unit = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}[unit_s]
    last = max((s.end_s for rank in ranks for s in rank), default=0.0)
    width = (1.02 * last if end_s is None else end_s) or unit_s
    axes.set(
        title=f"{title}: {last / unit_s:.1f} {unit}",
        xlabel=unit,
        xlim=(0, width / unit_s),
        ylim=(len(ranks) - 0.4, -0.6),
    )
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in range(len(ranks))])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.4, color="0.85")
    axes.set_axisbelow(True)
    box = axes.get_window_extent()
    a_pixel, row_pixels = width / max(box.width, 1), box.height / max(len(ranks), 1)
    for y, rank in enumerate(ranks):
        for kind in KINDS:
            bars = _bars([s for s in rank if s.kind == kind], _PIXELS * a_pixel)
            top, height = (y + 0.06, 0.34) if kind == MESSAGE else (y - 0.4, 0.44)
            _draw(axes, bars, kind, top, height, a_pixel, unit_s)
            if kind == MESSAGE and row_pixels >= 40:
                _label(axes, bars, y + 0.23, a_pixel, unit_s)
    axes.axvline(last / unit_s, color="black", linewidth=0.8, linestyle="--")
    if legend:
        axes.legend(
            handles=handles(_looks(ranks)), loc="lower left", bbox_to_anchor=(0, 1.12), ncols=len(KINDS), frameon=False
        )
    return _picture(ranks, title, last, unit_s, unit)


def timelines(panels: Mapping[str, Ranks], unit_s: float = 1e-3) -> tuple[Any, dict[str, Picture]]:
    """Draw a figure with a panel per timeline, one below the other on the same time axis. Return it and the texts."""
    from matplotlib import pyplot

    end_s = 1.02 * max((s.end_s for ranks in panels.values() for rank in ranks for s in rank), default=1.0)
    rows = [max(len(ranks), 1) for ranks in panels.values()]
    tall = max(0.3, 0.55 - 0.03 * max(rows, default=1))  # inches per rank
    size = (9, 0.6 + sum(0.45 + tall * n for n in rows))
    figure, all_axes = pyplot.subplots(
        len(rows), 1, figsize=size, dpi=100, sharex=True, squeeze=False, height_ratios=rows, layout="constrained"
    )
    looks = _looks([rank for ranks in panels.values() for rank in ranks])
    figure.legend(handles=handles(looks), loc="outside upper center", ncols=4, frameon=False)
    figure.draw_without_rendering()  # so that widths in pixels are known
    pictures = {
        name: timeline(axes, ranks, name, end_s, legend=False, unit_s=unit_s)
        for axes, (name, ranks) in zip(all_axes[:, 0], panels.items(), strict=True)
    }
    for axes in all_axes[:-1, 0]:
        axes.set_xlabel("")
    return figure, pictures


def hidden(rank: Sequence[Span]) -> tuple[float, float]:
    """(seconds in which a rank's messages were being sent, seconds of these in which it computed nothing)."""
    messages, compute, both = (
        sum(end - start for start, end in _union([s for s in rank if s.kind in kinds]))
        for kinds in ((MESSAGE,), KINDS[:-1], KINDS)
    )
    return messages, both - compute


@dataclass
class _Bar:
    """Spans that are drawn as one bar."""

    start_s: float
    end_s: float
    parts: list[Span]


def _bars(all_of_them: Iterable[Span], gap_s: float = 0.0) -> list[_Bar]:
    """Merge spans that overlap, or that have a gap of less than gap_s."""
    bars: list[_Bar] = []
    for span in sorted(all_of_them, key=lambda s: s.start_s):
        if bars and span.start_s < bars[-1].end_s + gap_s:
            bars[-1].end_s = max(bars[-1].end_s, span.end_s)
            bars[-1].parts.append(span)
        else:
            bars.append(_Bar(span.start_s, span.end_s, [span]))
    return bars


def _union(all_of_them: Iterable[Span]) -> list[tuple[float, float]]:
    return [(bar.start_s, bar.end_s) for bar in _bars(all_of_them)]


def _draw(axes: Any, bars: list[_Bar], kind: str, top: float, height: float, a_pixel: float, unit_s: float) -> None:
    """Draw bars of one kind, and in a merged bar a tick where each span begins."""
    colour, hatch = _LOOKS[kind]
    long = [(b.start_s / unit_s, max(b.end_s - b.start_s, a_pixel) / unit_s) for b in bars]
    axes.broken_barh(long, (top, height), facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
    drawn, ticks = -1.0, []
    for start in (s.start_s for b in bars if len(b.parts) > 1 for s in b.parts):
        if drawn < 0 or start - drawn >= 2 * _PIXELS * a_pixel:
            drawn = start
            ticks.append(start / unit_s)
    axes.vlines(ticks, top, top + height, color="black", linewidth=0.5)


def _label(axes: Any, bars: list[_Bar], y: float, a_pixel: float, unit_s: float) -> None:
    for bar in bars:
        count = len(bar.parts)
        text = (f"{count} messages, " if count > 1 else "") + readable(sum(s.bytes for s in bar.parts))
        if (bar.end_s - bar.start_s) / a_pixel >= 7 * len(text):
            look = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            middle = (bar.start_s + bar.end_s) / 2 / unit_s
            axes.text(middle, y, text, ha="center", va="center", fontsize=7, bbox=look, clip_on=True)


def _looks(ranks: Ranks) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each kind that occurs."""
    return {k: _LOOKS[k] for k in KINDS if any(s.kind == k for rank in ranks for s in rank)}


def _picture(ranks: Ranks, title: str, last_s: float, unit_s: float, unit: str) -> Picture:
    rows, waits = [], []
    for r, rank in enumerate(ranks):
        messages = [s for s in rank if s.kind == MESSAGE]
        under_way, alone = hidden(rank)
        waits.append(alone)
        spent = [sum(end - start for start, end in _union([s for s in rank if s.kind == k])) for k in KINDS[:-1]]
        numbers = (f"{t / unit_s:.1f}" for t in (*spent, under_way, alone))
        rows.append((r, *numbers, len(messages), readable(sum(s.bytes for s in messages))))
    timed = (f"{k}, {unit}" for k in (*KINDS[:-1], "messages under way", "of it not hidden"))
    worst = max(range(len(waits)), key=waits.__getitem__, default=0)
    alt = (
        f"{title}: {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks, a row each'}, with bars for compute above bars "
        f"for messages, until {last_s / unit_s:.1f} {unit}."
    )
    if any(s.kind == MESSAGE for rank in ranks for s in rank):
        alt += (
            f" Messages are under way with no compute above them for at most {waits[worst] / unit_s:.1f} {unit}, "
            f"on rank {worst}."
        )
    return Picture(alt, table(("rank", *timed, "messages", "payload"), rows))
