"""Draws a pipeline schedule: a row per rank, a bar per action with its micro-batch's number, white where it waits."""

from typing import Any

from ..cluster.schedule import KINDS, Simulation
from . import COLOURS, HATCHES, INK, handles

_NAMES = ("blue", "orange", "green", "yellow")  # forward and backward of chunk 0, 1; then again
_LOOKS = [(COLOURS[name], hatch) for name, hatch in zip(_NAMES, HATCHES, strict=False)]


def schedule(axes: Any, simulation: Simulation, title: str, end: float | None = None) -> None:
    """Draw a result of `lab.cluster.schedule.check` on matplotlib axes, from 0 to `end` (default: its length)."""
    ranks, length = simulation.ranks, simulation.length
    numbered = sum(map(len, ranks)) <= 600
    for rank, actions in enumerate(ranks):
        bars = zip(actions, simulation.starts[rank], simulation.ends[rank], strict=True)
        for action, start, stop in bars:
            colour, hatch = _look(action.kind, action.chunk)
            axes.barh(rank, stop - start, left=start, height=0.8, color=colour, hatch=hatch, edgecolor="white")
            if numbered:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                look = {"ha": "center", "va": "center", "color": "black", "fontsize": 9, "bbox": box}
                axes.text((start + stop) / 2, rank, str(action.micro_batch), **look)
    axes.set(
        title=f"{title}: idle / busy {simulation.bubble:.3g}, at most {max(simulation.live)} activations",
        xlabel="time, in forwards",
        xlim=(0, end or length),
        ylim=(len(ranks) - 0.4, -0.6),
    )
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in range(len(ranks))])
    axes.axvline(length, color=INK, linewidth=0.8, linestyle="--")
    chunks = 1 + max(action.chunk for actions in ranks for action in actions)
    pairs = [(kind, chunk) for chunk in range(chunks) for kind in KINDS]
    looks = {kind + (f", chunk {chunk}" if chunks > 1 else ""): _look(kind, chunk) for kind, chunk in pairs}
    axes.legend(handles=handles(looks), loc="lower right", bbox_to_anchor=(1, 1.15), ncols=len(looks), frameon=False)


def _look(kind: str, chunk: int) -> tuple[str, str]:
    return _LOOKS[(2 * chunk + KINDS.index(kind)) % len(_LOOKS)]
