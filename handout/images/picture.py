"""Draws boxes, words and lines as SVG, and charts of computed numbers.

A picture has its own background, light or dark as the reader's system is, so it is readable on any page. The colours
are Okabe and Ito's, and words repeat their meaning. A phone can readably show 440 pixels.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
WIDTH = 440

Bar = tuple[float, float, str]  # start, length and words
Ticks = Mapping[float, str] | Iterable[float]  # labels by value, or values that are their own labels
T = TypeVar("T")

BLUE, ORANGE, GREEN, YELLOW, GREY = "#56b4e9", "#e69f00", "#2fb98e", "#f0e442", "#b8bcc2"
COLOURS = (BLUE, ORANGE, GREEN, YELLOW)  # of ranks, experts and the like
QUARTERS = {n / 4: f"{25 * n} %" for n in range(5)}  # ticks of an axis from 0 to 1
STYLE = """
.paper { fill: #ffffff } .ink { fill: #1b1f24 } .soft { fill: #57606a } .in { fill: #101418 }
.line { stroke: #57606a; fill: none; stroke-width: 1.5 } .faint { stroke: #d0d7de; fill: none }
.dashed { stroke-dasharray: 5 4 } .curve { fill: none; stroke-width: 2.5 } .rim { stroke: #57606a; stroke-width: 1.5 }
text { font-family: system-ui, sans-serif; font-size: 14px } .small { font-size: 12.5px } .bold { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #1b1f24 } .ink { fill: #e6e9ed } .soft { fill: #aab2bb } .line { stroke: #aab2bb }
  .faint { stroke: #3d444d }
}"""


def spaced(items: Iterable[T], start: float, step: float) -> Iterator[tuple[float, T]]:
    """Yield each item with its position: start, start + step, and so on."""
    return ((start + step * i, item) for i, item in enumerate(items))


def load(file: str) -> Any:
    """Read a JSON file of benchmarks/, such as "results/link.json"."""
    return json.loads((HERE.parent.parent / "benchmarks" / file).read_text(encoding="utf-8"))


class Lane(list[Bar]):
    """Bars, one after the other, on a time axis."""

    @property
    def end(self) -> float:
        return self[-1][0] + self[-1][1] if self else 0.0

    def add(self, ready: float, length: float, words: str = "") -> float:
        """Add a bar that starts when it is ready and the previous bar has ended. Return its start."""
        start = max(ready, self.end)
        self.append((start, length, words))
        return start


class Picture:
    """An SVG of WIDTH × height pixels."""

    def __init__(self, name: str, height: int, title: str):
        self.name, self.size, self.title, self.parts = name, (WIDTH, height), title, list[str]()

    def box(
        self, x: float, y: float, w: float, h: float, colour: str | None, words: str = "", hatched: bool = False
    ) -> None:
        """Draw a filled box; without a colour, an empty frame."""
        if colour is None:
            return self.frame(x, y, w, h, words)
        for fill in (colour, "url(#hatch)")[: 1 + hatched]:
            self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}"/>')
        if words:
            self.words(x + w / 2, y + h / 2 + 5, words, "in" if w > 5 * len(words) + 12 else "in small", "middle")

    def stack(
        self, x: float, y: float, scale: float, parts: Iterable[tuple[float, str, str]], height: float, gap: float = 2
    ) -> float:
        """Draw boxes side by side for (amount, colour, words), with `scale` pixels per unit. Return where they end."""
        for amount, colour, words in parts:
            self.box(x, y, amount * scale - gap, height, colour, words)
            x += amount * scale
        return x

    def frame(self, x: float, y: float, w: float, h: float, words: str = "", kind: str = "line dashed") -> None:
        """Draw an empty box, for something absent or around other boxes."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" class="{kind}"/>')
        if words:
            self.words(x + w / 2, y + h / 2 + 5, words, "soft", "middle")

    def disc(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" class="rim"/>')

    def words(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False, arrow: bool = False) -> None:
        tip = ' marker-end="url(#tip)"' if arrow else ""
        kind = "line dashed" if dashed else "line"
        self.parts.append(f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" class="{kind}"{tip}/>')

    def lanes(
        self, top: float, name: str, scale: float, upper: Sequence[Bar], lower: Sequence[Bar], end: str = "{:.1f} ms"
    ) -> None:
        """Draw a lane, such as compute, above another, such as messages, and when the last bar ends (format `end`)."""
        last = max(start + length for start, length, _ in (*upper, *lower))
        self.words(16, top, f"{name}: {end.format(last)}", "ink bold")
        self.bars(top + 8, scale, upper, BLUE)
        self.bars(top + 36, scale, lower, ORANGE)

    def bars(self, y: float, scale: float, bars: Sequence[Bar], colour: str, height: float = 24) -> None:
        """Draw boxes along a time axis with `scale` pixels per unit."""
        for start, length, words in bars:
            self.box(16 + start * scale, y, length * scale - 2, height, colour, words)

    def busy(
        self, y: float, scale: float, spans: Iterable[Sequence[float]], colour: str, height: float, end: float
    ) -> None:
        """Draw columns on a line at y, 3 pixels wide: their height is the share of time that the spans cover."""
        spans, column = list(spans), 3 / scale
        for i in range(round(end / column)):
            share = sum(max(0.0, min(b, (i + 1) * column) - max(a, i * column)) for a, b in spans) / column
            if share > 0.005:
                x, up = 16 + 3 * i, max(1.0, height * share)
                self.parts.append(f'<rect x="{x}" y="{y - up:.1f}" width="3" height="{up:.1f}" fill="{colour}"/>')
        self.line(16, y, 16 + end * scale, y)

    def times(self, y: float, scale: float, times: Iterable[int], unit: str, left: float = 16) -> None:
        """Label points on a time axis. The unit is written next to 0."""
        for time in times:
            text, anchor = (str(time), "middle") if time else (f"0 {unit}", "start")
            self.words(left + time * scale, y, text, "soft small", anchor)

    def clock(self, y: float, ms: float, last: int, step: int = 2, left: float = 16) -> None:
        """Draw a time axis in ms, with a tick and a label every `step` ms."""
        self.line(left, y, left + ms * last + 12, y, arrow=True)
        for time in range(0, last + 1, step):
            self.line(left + time * ms, y, left + time * ms, y + 5)
            self.times(y + 20, ms, [time], "ms", left)

    def svg(self) -> str:
        width, height = self.size
        hatch = '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}">',
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>",
            f'<defs>{hatch}<path d="M0 0V7" stroke="#ffffff" stroke-width="3" opacity=".6"/></pattern>',
            f'{tip}<path d="M0 0L8 4L0 8Z" class="soft"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" class="paper"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


Draw = Callable[[Picture], None]
PICTURES: list[tuple[Picture, Draw]] = []


def picture(height: int, title: str) -> Callable[[Draw], Draw]:
    """Register a function that draws a picture. The file has the function's name without a final _."""

    def register(draw: Draw) -> Draw:
        PICTURES.append((Picture(draw.__name__.rstrip("_"), height, title), draw))
        return draw

    return register


class Chart:
    """Curves in a rectangle of a picture, over logarithmic or linear axes."""

    def __init__(
        self, p: Picture, x: tuple[float, float], y: tuple[float, float], log_x: bool = True, log_y: bool = True
    ):
        self.p, self.x, self.y, self.log_x, self.log_y = p, x, y, log_x, log_y
        self.left, self.top, self.right, self.bottom = 64.0, 40.0, p.size[0] - 20.0, p.size[1] - 46.0

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        x_share, y_share = _share(x, self.x, self.log_x), _share(y, self.y, self.log_y)
        return self.left + x_share * (self.right - self.left), self.bottom - y_share * (self.bottom - self.top)

    def axes(self, x_name: str, y_name: str, xs: Ticks, ys: Ticks) -> None:
        """Draw the axes' names and ticks."""
        for value, label in _labels(ys):
            _, y = self.pixel(self.x[0], value)
            self.p.parts.append(f'<path d="M{self.left:g} {y:g} H{self.right:g}" class="faint"/>')
            self.p.words(self.left - 6, y + 5, label, "soft small", "end")
        for value, label in _labels(xs):
            x, _ = self.pixel(value, self.y[1])
            self.p.words(x, self.bottom + 18, label, "soft small", "middle")
        self.p.line(self.left, self.bottom, self.right, self.bottom)
        self.p.words((self.left + self.right) / 2, self.bottom + 37, x_name, "soft", "middle")
        self.p.words(12, 22, y_name, "soft")

    def curve(self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> None:
        path = " L".join("{:.1f} {:.1f}".format(*self.pixel(x, y)) for x, y in points)
        kind = "curve dashed" if dashed else "curve"
        self.p.parts.append(f'<path d="M{path}" class="{kind}" stroke="{colour}"/>')

    def dot(
        self, x: float, y: float, colour: str, text: str = "", anchor: str = "start", dx: float = 0, dy: float = 0
    ) -> None:
        """Draw a dot and its label."""
        self.p.disc(*self.pixel(x, y), colour)
        if text:
            self.label(x, y, text, anchor, dx, dy)

    def label(self, x: float, y: float, text: str, anchor: str = "start", dx: float = 0, dy: float = 0) -> None:
        left, top = self.pixel(x, y)
        self.p.words(left + dx, top + dy, text, "ink", anchor)


def _labels(ticks: Ticks) -> Iterable[tuple[float, str]]:
    return ticks.items() if isinstance(ticks, Mapping) else ((value, f"{value:,g}") for value in ticks)


def _share(value: float, axis: tuple[float, float], log: bool) -> float:
    """The position of a value on an axis: 0 at its low end, 1 at its high end."""
    low, high = axis
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
