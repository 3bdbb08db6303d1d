"""Plots memory over the course of a step."""

from typing import Any

from ..measure.memory import Memory
from . import COLOURS, HATCHES, INK

MIB = 2.0**20


def memory_timeline(axes: Any, memory: Memory, title: str) -> None:
    """Draw live memory after each allocation and free on matplotlib axes. Stacks show the phase of the allocation."""
    lines = memory.timeline()
    stacks = axes.stackplot(
        range(len(next(iter(lines.values()), []))),
        *([b / MIB for b in line] for line in lines.values()),
        labels=list(lines),
        colors=list(COLOURS.values())[: len(lines)],
    )
    for stack, hatch in zip(stacks, HATCHES, strict=False):
        stack.set(hatch=hatch, edgecolor="white", linewidth=0)
    peak = memory.peak_bytes / MIB
    axes.axhline(peak, color=INK, linewidth=0.8, linestyle="--")
    axes.set(title=f"{title}: peak {peak:.1f} MiB", xlabel="allocations and frees, in order", ylabel="MiB")
    axes.legend(loc="upper left")
