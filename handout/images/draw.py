"""Draws the chapters' pictures: `python handout/images/draw.py` writes six SVGs beside itself.

Each carries its own paper, light or dark as the reader's system is, so it can be read on any page. Colours are
Okabe and Ito's, and never alone: what a box is stands in it.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from lab.world.cluster import ring_cost  # noqa: E402

BLUE, ORANGE, GREEN, YELLOW, GREY = "#56b4e9", "#e69f00", "#2fb98e", "#f0e442", "#b8bcc2"
STYLE = """
.paper { fill: #ffffff } .ink { fill: #1b1f24 } .soft { fill: #57606a } .in { fill: #101418 }
.line { stroke: #57606a; fill: none; stroke-width: 1.5 } .dashed { stroke-dasharray: 5 4 }
text { font-family: system-ui, sans-serif; font-size: 14px }
@media (prefers-color-scheme: dark) {
  .paper { fill: #1b1f24 } .ink { fill: #e6e9ed } .soft { fill: #aab2bb } .line { stroke: #aab2bb }
}"""


class Picture:
    """Boxes, words and lines on a paper of width × height."""

    def __init__(self, name: str, width: int, height: int, title: str):
        self.path, self.size, self.title, self.parts = HERE / f"{name}.svg", (width, height), title, []

    def box(self, x: float, y: float, w: float, h: float, colour: str, words: str = "", hatched: bool = False) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}"/>')
        if hatched:
            self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="url(#hatch)"/>')
        if words:
            self.words(x + w / 2, y + h / 2 + 5, words, "in", "middle")

    def words(self, x: float, y: float, said: str, kind: str = "ink", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False, arrow: bool = False) -> None:
        tip = ' marker-end="url(#tip)"' if arrow else ""
        kind = "line dashed" if dashed else "line"
        self.parts.append(f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" class="{kind}"{tip}/>')

    def save(self) -> None:
        width, height = self.size
        hatch = '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        inside = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}">',
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>",
            f'<defs>{hatch}<path d="M0 0V7" stroke="#ffffff" stroke-width="3" opacity=".6"/></pattern>',
            f'{tip}<path d="M0 0L8 4L0 8Z" class="soft"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" class="paper"/>',
            *self.parts,
            "</svg>",
        ]
        self.path.write_text("\n".join(inside) + "\n", encoding="utf-8")


def clock() -> None:
    p = Picture("clock", 720, 200, "A host asks for three kernels and runs ahead of the device")
    p.words(20, 72, "host")
    p.words(20, 122, "device")
    for i in range(3):
        p.box(90 + 48 * i, 52, 44, 30, BLUE, "ask")
    p.box(234, 52, 368, 30, GREY, "synchronize: wait", hatched=True)
    for i in range(3):
        p.box(138 + 156 * i, 102, 150, 30, ORANGE, f"kernel {i + 1}")
    for x, said, below in (
        (234, "a clock read here saw the asking", "microseconds"),
        (606, "here, the work", "milliseconds"),
    ):
        p.line(x, 34, x, 150, dashed=True)
        p.words(x, 26, said, "ink", "middle")
        p.words(x, 170, below, "soft", "middle")
    p.line(90, 184, 690, 184, arrow=True)
    p.words(90, 176, "time", "soft")
    p.save()


def bits() -> None:
    p = Picture("bits", 720, 176, "The bits of float32, bfloat16 and float16: sign, exponent, fraction")
    for i, (name, exponent, fraction) in enumerate((("float32", 8, 23), ("bfloat16", 8, 7), ("float16", 5, 10))):
        y, bit = 20 + 48 * i, 17.5
        p.words(20, y + 23, name)
        p.box(100, y, bit - 2, 34, GREY, "±")
        p.box(100 + bit, y, exponent * bit - 2, 34, ORANGE, f"{exponent} exponent")
        p.box(100 + (1 + exponent) * bit, y, fraction * bit - 2, 34, BLUE, f"{fraction} fraction")
    p.words(400, 92, "the same range as float32, coarse steps")
    p.words(400, 140, "fine steps, but nothing above 65,504")
    p.save()


def tiles() -> None:
    p = Picture("tiles", 720, 300, "Tiles of the causal score matrix, and what one tile of queries keeps")
    p.words(200, 26, "keys and values, a tile at a time →", "soft", "middle")
    for j in range(4):
        p.box(100 + 52 * j, 36, 48, 22, GREEN, f"k, v {j}")
    for i in range(4):
        p.box(44, 66 + 52 * i, 48, 48, ORANGE, f"q {i}")
        for j in range(4):
            x, y = 100 + 52 * j, 66 + 52 * i
            if j < i:
                p.box(x, y, 48, 48, BLUE, "all")
            elif i == j:
                p.box(x, y, 48, 48, YELLOW, "i ≥ j")
            else:
                p.parts.append(f'<rect x="{x}" y="{y}" width="48" height="48" rx="3" class="line dashed"/>')
    p.words(200, 292, "dashed: above the diagonal, never visited", "soft", "middle")
    p.words(360, 84, "A tile of queries walks its row and keeps")
    for i, (w, name, said) in enumerate(
        (
            (22, "m", "the largest score so far"),
            (22, "l", "the sum of exponentials"),
            (110, "acc", "the weighted sum of v"),
        )
    ):
        p.box(360, 104 + 44 * i, w, 34, BLUE, name)
        p.words(482, 126 + 44 * i, said, "soft")
    p.words(360, 262, "No score outlives its tile.")
    p.save()


def overlap() -> None:
    p = Picture("overlap", 720, 214, "One step with two gradients of 1 MB on a link: naive, flat and overlapped")
    one, two = (1e3 * ring_cost("all_reduce", n * 1e6, 4, 1e-4, 1e-9) for n in (1, 2))
    ms = 52.0
    rows = (
        ("naive", [(6, one, "g₂"), (6 + one, one, "g₁")]),
        ("flat", [(6, two, "both")]),
        ("overlapped", [(3, one, "g₂"), (6, one, "g₁")]),
    )
    for i, (name, sends) in enumerate(rows):
        y = 34 + 56 * i
        p.words(20, y + 14, name)
        p.box(110, y, 3 * ms - 2, 20, BLUE, "backward of 2")
        p.box(110 + 3 * ms, y, 3 * ms - 2, 20, BLUE, "of 1")
        for start, long, words in sends:
            p.box(110 + start * ms, y + 22, long * ms - 2, 20, ORANGE, words, hatched=False)
        end = max(start + long for start, long, _ in sends)
        p.words(110 + end * ms + 6, y + 37, f"{end:.1f} ms", "soft")
    p.words(110, 22, "upper lane: computes; lower lane: sends", "soft")
    p.line(110, 202, 700, 202, arrow=True)
    p.save()


def shares() -> None:
    p = Picture("shares", 720, 214, "Bytes a parameter on each of 4 ranks, float32 AdamW")
    rows = (("data parallel", 4, 4, 8), ("ZeRO-1", 4, 4, 2), ("ZeRO-2", 4, 1, 2), ("ZeRO-3, FSDP", 1, 1, 2))
    for i, (name, parameters, gradients, state) in enumerate(rows):
        x, y, byte = 130.0, 30 + 44 * i, 31
        p.words(20, y + 21, name)
        for n, colour, letter in ((parameters, BLUE, "p"), (gradients, GREEN, "g"), (state, ORANGE, "state")):
            p.box(x, y, n * byte - 2, 32, colour, f"{letter} {n}" if n > 1 else letter, hatched=False)
            x += n * byte
        p.words(x + 8, y + 21, f"{parameters + gradients + state} bytes", "soft")
    p.words(130, 22, "p: parameters, g: gradients; bytes a parameter on each of 4 ranks", "soft")
    p.save()


def grid() -> None:
    p = Picture("grid", 720, 278, "Eight ranks on two machines as data=2, pipe=2, tensor=2")
    for d in range(2):
        left = 30 + 350 * d
        p.parts.append(f'<rect x="{left}" y="40" width="310" height="180" rx="8" class="line"/>')
        p.words(left + 155, 30, f"machine {d}: data {d}", "ink", "middle")
        for stage in range(2):
            for t in range(2):
                x, y = left + 40 + 150 * stage, 64 + 84 * t
                p.box(x, y, 80, 48, BLUE if t == 0 else ORANGE, f"rank {(d * 2 + stage) * 2 + t}")
            x = left + 80 + 150 * stage
            p.line(x - 4, 112, x - 4, 148)
            p.line(x + 4, 112, x + 4, 148)
            p.words(x + 12, 135, "tensor", "soft")
        for t in range(2):
            y = 88 + 84 * t
            p.line(left + 120, y, left + 188, y, arrow=True)
            p.words(left + 153, y - 6, "pipe", "soft", "middle")
    p.parts.append('<path d="M110 196 C110 258 460 258 460 196" class="line dashed"/>')
    p.words(285, 262, "data: once a step, each rank with its like", "soft", "middle")
    p.save()


if __name__ == "__main__":
    for draw in (clock, bits, tiles, overlap, shares, grid):
        draw()
