"""Draws the chapters' pictures: `python handout/images/draw.py` writes an SVG for each function of PICTURES."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from handout.images import benchmarking, ddp, flash_attention, mesh, mixed_precision, planning, zero  # noqa: E402

CHAPTERS = (benchmarking, mixed_precision, flash_attention, ddp, zero, mesh, planning)
PICTURES = tuple(draw for chapter in CHAPTERS for draw in chapter.PICTURES)

if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, default=HERE)
    folder = asked.parse_args().out
    for draw in PICTURES:
        drawn = draw()
        (folder / f"{drawn.name}.svg").write_text(drawn.svg(), encoding="utf-8")
