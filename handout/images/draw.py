"""Draws the chapters' pictures: `python handout/images/draw.py` writes an SVG for each function of PICTURES.

Beside them it writes the numbers of the figures that move, a JSON file for each function of MOVING.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from handout.images import (  # noqa: E402
    benchmarking,
    benchmarking_costs,
    ddp,
    flash_attention,
    flash_attention_costs,
    journey,
    mesh,
    mesh_costs,
    mixed_precision,
    mixed_precision_memory,
    planning,
    planning_costs,
    zero,
)  # fmt: skip
from handout.images.moving import MOVING  # noqa: E402

CHAPTERS = (
    journey, benchmarking, benchmarking_costs, mixed_precision, mixed_precision_memory, flash_attention,
    flash_attention_costs, ddp, zero, mesh, mesh_costs, planning, planning_costs,
)  # fmt: skip
PICTURES = tuple(draw for chapter in CHAPTERS for draw in chapter.PICTURES)

if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, default=HERE)
    asked.add_argument("--numbers", type=Path, default=HERE.parent / "site" / "moving")
    given = asked.parse_args()
    for draw in PICTURES:
        drawn = draw()
        (given.out / f"{drawn.name}.svg").write_text(drawn.svg(), encoding="utf-8")
    for numbers in MOVING:
        text = json.dumps(numbers(), ensure_ascii=False, separators=(",", ":"))
        (given.numbers / f"{numbers.__name__}.json").write_text(f"{text}\n", encoding="utf-8")
