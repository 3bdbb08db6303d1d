"""Draws the chapters' pictures: `python handout/images/draw.py` writes an SVG for each function that is a @picture.

It also writes the numbers of the interactive figures, a JSON file for each function of MOVING.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from handout.images.moving import MOVING  # noqa: E402
from handout.images.picture import PICTURES  # noqa: E402

CHAPTERS = (
    "journey", "benchmarking", "benchmarking_costs", "mixed_precision", "mixed_precision_memory", "flash_attention",
    "flash_attention_costs", "ddp", "ddp_costs", "ddp_link", "zero", "zero_pitfalls", "mesh", "mesh_experts",
    "mesh_costs", "planning", "planning_costs",
)  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--numbers", type=Path, default=HERE.parent / "site" / "moving")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small, and sums then have the same order on all machines
    for chapter in CHAPTERS:
        import_module(f"handout.images.{chapter}")
    for paper, draw in PICTURES:
        draw(paper)
        (options.out / f"{paper.name}.svg").write_text(paper.svg(), encoding="utf-8")
    for numbers in MOVING:
        text = json.dumps(numbers(), ensure_ascii=False, separators=(",", ":"))
        (options.numbers / f"{numbers.__name__}.json").write_text(f"{text}\n", encoding="utf-8")
