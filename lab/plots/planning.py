"""Plots of plans: a map of meshes."""

from collections.abc import Mapping
from typing import Any

from . import COLOURS, HATCHES


def mesh_map(axes: Any, speeds: Mapping[tuple[int, int], float | None], title: str) -> None:
    """Draw one cell per (pipe, tensor) with the speed of its best plan. A speed of None means that no plan fits."""
    pipes, tensors = (sorted({key[i] for key in speeds}) for i in (0, 1))
    fastest = max((v for v in speeds.values() if v), default=1.0)
    for (pipe, tensor), speed in speeds.items():
        x, y = pipes.index(pipe), tensors.index(tensor)
        if speed is None:
            axes.barh(y, 0.96, left=x - 0.48, height=0.96, color="white", hatch=HATCHES[1], edgecolor="0.6")
            continue
        axes.barh(y, 0.96, left=x - 0.48, height=0.96, color=COLOURS["blue"], alpha=0.15 + 0.7 * speed / fastest)
        best = {"fontweight": "bold"} if speed == fastest else {}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(x, y, f"{speed:.0f}", ha="center", va="center", color="black", fontsize=10, bbox=box, **best)
    axes.set(
        title=title, xlabel="pipe", ylabel="tensor", xlim=(-0.5, len(pipes) - 0.5), ylim=(-0.5, len(tensors) - 0.5)
    )
    axes.set_xticks(range(len(pipes)), [str(p) for p in pipes])
    axes.set_yticks(range(len(tensors)), [str(t) for t in tensors])
