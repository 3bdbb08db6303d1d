"""Pictures of plans: the roofs over a layer, the map of meshes, scaling, and a simulated step as a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..cluster.simulator import Bar
from . import COLOURS, HATCHES, Picture
from .timeline import MESSAGE, Span

_PHASES = {"forward": "forward", "recompute": "backward", "backward": "backward", "step": "step"}


def roofs(axes: Any, tokens: Sequence[float], curves: Mapping[str, Sequence[float]], title: str) -> Picture:
    """Share of a device's peak over tokens of a data rank: one curve for each of `curves`, all at most 1."""
    markers = ("o", "s", "^", "D")
    looks = zip(COLOURS.values(), markers, strict=False)
    for (name, values), (colour, marker) in zip(curves.items(), looks, strict=False):
        axes.plot(tokens, values, color=colour, marker=marker, markersize=4, label=name)
    axes.set(title=title, xscale="log", xlabel="tokens of a data rank", ylabel="share of peak", ylim=(0, 1.02))
    axes.legend(frameon=False)
    head = f"| tokens | {' | '.join(curves)} |\n|{'---|' * (len(curves) + 1)}"
    rows = [
        f"| {count:g} | {' | '.join(f'{values[i]:.2f}' for values in curves.values())} |"
        for i, count in enumerate(tokens)
    ]
    return Picture(f"{title}: share of peak over tokens, {', '.join(curves)}.", "\n".join([head, *rows]))


def mesh_map(axes: Any, speeds: Mapping[tuple[int, int], float | None], title: str, unit: str) -> Picture:
    """Cells of pipe (across) and tensor (upwards) with the speed of the best plan there; None: nothing fits."""
    pipes, tensors = (sorted({key[i] for key in speeds}) for i in (0, 1))
    most = max((v for v in speeds.values() if v), default=1.0)
    for (pipe, tensor), speed in speeds.items():
        x, y = pipes.index(pipe), tensors.index(tensor)
        if speed is None:
            axes.barh(y, 0.96, left=x - 0.48, height=0.96, color="white", hatch=HATCHES[1], edgecolor="0.6")
            continue
        axes.barh(y, 0.96, left=x - 0.48, height=0.96, color=COLOURS["blue"], alpha=0.15 + 0.7 * speed / most)
        best = {"fontweight": "bold"} if speed == most else {}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(x, y, f"{speed:.0f}", ha="center", va="center", fontsize=8, bbox=box, **best)
    axes.set(
        title=title, xlabel="pipe", ylabel="tensor", xlim=(-0.5, len(pipes) - 0.5), ylim=(-0.5, len(tensors) - 0.5)
    )
    axes.set_xticks(range(len(pipes)), [str(p) for p in pipes])
    axes.set_yticks(range(len(tensors)), [str(t) for t in tensors])
    head = f"| tensor, pipe → | {' | '.join(map(str, pipes))} |\n|{'---|' * (len(pipes) + 1)}"

    def cell(pipe: int, tensor: int) -> str:
        speed = speeds.get((pipe, tensor))
        return "–" if speed is None else f"{speed:.0f}"

    rows = [f"| {t} | {' | '.join(cell(p, t) for p in pipes)} |" for t in tensors]
    where = next((key for key, v in speeds.items() if v == most), None)
    alt = f"{title}: {unit} of the best plan for each pipe and tensor; the most, {most:.0f}, at (pipe, tensor) {where}."
    return Picture(alt, "\n".join([head, *rows]))


def scaling(axes: Any, gpus: Sequence[int], curves: Mapping[str, Sequence[float]], title: str) -> Picture:
    """TFLOP/s of a device over the number of devices; a level line is perfect scaling."""
    looks = zip(COLOURS.values(), ("o", "s", "^"), strict=False)
    for (name, values), (colour, marker) in zip(curves.items(), looks, strict=False):
        axes.plot(gpus, values, color=colour, marker=marker, label=name)
    axes.set(title=title, xscale="log", xlabel="devices", ylabel="TFLOP/s a device")
    axes.set_ylim(0, 1.15 * max(map(max, curves.values())))
    axes.set_xticks(list(gpus), [f"{n:,}" for n in gpus])
    axes.minorticks_off()
    axes.legend(frameon=False)
    head = f"| devices | {' | '.join(curves)} |\n|{'---|' * (len(curves) + 1)}"
    rows = [f"| {n:,} | {' | '.join(f'{v[i]:.0f}' for v in curves.values())} |" for i, n in enumerate(gpus)]
    told = "; ".join(f"{name} from {values[0]:.0f} to {values[-1]:.0f}" for name, values in curves.items())
    return Picture(f"{title}: TFLOP/s a device, {told}.", "\n".join([head, *rows]))


def spans(timeline: Mapping[int, Sequence[Bar]]) -> list[list[Span]]:
    """What `lab.cluster.simulator.play` wrote down, a list a stage, for `lab.plots.timeline`."""
    return [
        [Span(_PHASES.get(bar.kind, MESSAGE), bar.name, bar.start_s, bar.end_s) for bar in bars]
        for bars in timeline.values()
    ]
