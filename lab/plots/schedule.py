"""Draws a pipeline schedule: a row per rank, a bar per action with its micro-batch's number, white where it waits."""

from typing import Any

from ..cluster.schedule import KINDS, Simulation
from . import COLOURS, HATCHES, Picture, handles, table

_NAMES = ("blue", "orange", "green", "yellow")  # forward and backward of chunk 0, 1; then again
_LOOKS = [(COLOURS[name], hatch) for name, hatch in zip(_NAMES, HATCHES, strict=False)]


def schedule(axes: Any, simulation: Simulation, title: str, legend: bool = True, end: float | None = None) -> Picture:
    """Draw a result of `lab.cluster.schedule.check` on matplotlib axes, from 0 to `end` (default: its length)."""
    ranks, length = simulation.ranks, simulation.length
    numbered = sum(map(len, ranks)) <= 600
    for rank, actions in enumerate(ranks):
        bars = zip(actions, simulation.starts[rank], simulation.ends[rank], strict=True)
        for action, start, stop in bars:
            colour, hatch = _look(action.kind, action.chunk)
            axes.barh(rank, stop - start, left=start, height=0.8, color=colour, hatch=hatch, edgecolor="white")
            if numbered:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axes.text(
                    (start + stop) / 2, rank, str(action.micro_batch), ha="center", va="center", fontsize=7, bbox=box
                )
    axes.set(
        title=f"{title}: idle / busy {simulation.bubble:.3g}, at most {max(simulation.live)} activations",
        xlabel="time, in forwards",
        xlim=(0, end or length),
        ylim=(len(ranks) - 0.4, -0.6),
    )
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in range(len(ranks))])
    axes.axvline(length, color="black", linewidth=0.8, linestyle="--")
    if legend:
        chunks = _chunks(simulation)
        each = [(kind, chunk) for chunk in range(chunks) for kind in KINDS]
        looks = {kind + (f", chunk {chunk}" if chunks > 1 else ""): _look(kind, chunk) for kind, chunk in each}
        axes.legend(handles=handles(looks), loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _picture(simulation, title)


def _look(kind: str, chunk: int) -> tuple[str, str]:
    return _LOOKS[(2 * chunk + KINDS.index(kind)) % len(_LOOKS)]


def _chunks(simulation: Simulation) -> int:
    return 1 + max(action.chunk for actions in simulation.ranks for action in actions)


def _picture(simulation: Simulation, title: str) -> Picture:
    ranks, chunks = simulation.ranks, _chunks(simulation)
    micro_batches = len(ranks[0]) // (2 * chunks)
    head = ("rank", "order (F forward, B backward, of which micro-batch)", "busy", "idle", "live")
    idle = f"{simulation.length - simulation.busy:g}"
    rows = [
        (rank, " ".join(_short(a, chunks) for a in actions), f"{simulation.busy:g}", idle, simulation.live[rank])
        for rank, actions in enumerate(ranks)
    ]
    more = f" and {chunks} chunks a rank" if chunks > 1 else ""
    alt = (
        f"{title}: {len(ranks)} ranks, a row each, and {micro_batches} micro-batches{more}; each rank is busy for "
        f"{simulation.busy:g} of {simulation.length:g} units of time, and keeps at most {simulation.live} activations."
    )
    return Picture(alt, table(head, rows))


def _short(action: Any, chunks: int) -> str:
    return f"{action.kind[0].upper()}{action.micro_batch}" + (f".{action.chunk}" if chunks > 1 else "")
