"""A mesh in colours: the same ranks once for each axis, those of one group alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import COLOURS, HATCHES, Picture

_LOOKS = [(colour, hatch) for hatch in HATCHES for colour in COLOURS.values()]  # 25 groups look different


def mesh(panels: Sequence[Any], groups: Mapping[str, Sequence[Sequence[int]]], columns: int) -> Picture:
    """Draw one panel of matplotlib axes for each axis of the mesh. groups: by axis, the ranks of each of its groups.

    Ranks lie in rows of `columns`, from the upper left; what is in one row is near.
    """
    for axes, (name, partition) in zip(panels, groups.items(), strict=True):
        for number, ranks in enumerate(partition):
            colour, hatch = _LOOKS[number % len(_LOOKS)]
            for rank in ranks:
                row, column = divmod(rank, columns)
                axes.barh(row, 0.9, left=column, height=0.9, color=colour, hatch=hatch, edgecolor="white")
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axes.text(column + 0.45, row, str(rank), ha="center", va="center", fontsize=8, bbox=box)
        axes.set(title=name, xticks=[], yticks=[])
        axes.invert_yaxis()
        axes.set_frame_on(False)
    told = {name: " ".join("{" + " ".join(map(str, ranks)) + "}" for ranks in part) for name, part in groups.items()}
    return Picture(
        "; ".join(f"{name}: {sets}" for name, sets in told.items()),
        "\n".join(["| axis | groups |", "|---|---|", *(f"| {name} | {sets} |" for name, sets in told.items())]),
    )
