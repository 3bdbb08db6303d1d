"""Draws a pipeline schedule: a row per rank, a bar per action with its micro-batch's number, white where it waits."""

from typing import Any

from ..cluster.schedule import KINDS, Simulation
from . import COLOURS, HATCHES, INK, handles

_COLOUR_NAMES = ("blue", "orange", "green", "yellow")  # forward, backward of chunk 0, then of 1; chunk 2 is like 0
_STYLES = [(COLOURS[name], hatch) for name, hatch in zip(_COLOUR_NAMES, HATCHES, strict=False)]


def schedule(axes: Any, simulation: Simulation, title: str, end: float | None = None) -> None:
    """Draw a result of `lab.cluster.schedule.check` on matplotlib axes, from time 0 to `end` (default: its length)."""
    ranks, length = simulation.ranks, simulation.length
    numbered = sum(map(len, ranks)) <= 600
    for rank, actions in enumerate(ranks):
        bars = zip(actions, simulation.starts[rank], simulation.ends[rank], strict=True)
        for action, start, stop in bars:
            colour, hatch = _style_of(action.kind, action.chunk)
            axes.barh(rank, stop - start, left=start, height=0.8, color=colour, hatch=hatch, edgecolor="white")
            if numbered:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                text_style = {"ha": "center", "va": "center", "color": "black", "fontsize": 9, "bbox": box}
                axes.text((start + stop) / 2, rank, str(action.micro_batch), **text_style)
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
    styles = {kind + (f", chunk {chunk}" if chunks > 1 else ""): _style_of(kind, chunk) for kind, chunk in pairs}
    axes.legend(handles=handles(styles), loc="lower right", bbox_to_anchor=(1, 1.15), ncols=len(styles), frameon=False)


def _style_of(kind: str, chunk: int) -> tuple[str, str]:
    return _STYLES[(2 * chunk + KINDS.index(kind)) % len(_STYLES)]
