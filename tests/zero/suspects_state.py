"""Why a checkpoint is not whole, by the names of its files before and after a save, so that a message can name it."""

from __future__ import annotations

from lab.judge import harmless


@harmless
def why_not_whole(loaded: str, first: list[str], last: list[str]) -> str:
    """Why neither the first save nor the second could be loaded. first, last: the names of their files."""
    first, last = ({n for n in names if not n.endswith(".json")} for names in (first, last))
    missing = [n for n in sorted(first | last) if "FileNotFound" in loaded and n in loaded]
    if missing and missing[0] in first - last:
        return f"{missing[0]}, of the first save, is removed already: remove it when the index names it no more"
    if missing and missing[0] in last - first:
        return f"the index names {missing[0]}, which is not written yet: replace the index when all ranks have written"
    if "JSONDecodeError" in loaded:
        return "the index is there and not whole, as it is written: write it under another name, then os.replace it"
    if "mixture" in loaded and first & last:
        return f"the second save writes over {', '.join(sorted(first & last))} of the first: give its files new names"
    if "mixture" in loaded and "extra is 'new'; not old: [];" in loaded:
        return "extra is the second save's, and all else the first's: one os.replace is to bring both, of one file"
    return (
        "write beside what is there, under new names, and let one os.replace, when all have written, make it the "
        "checkpoint"
    )
