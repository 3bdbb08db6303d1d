"""What was seen of tensors that travel, so that a message can name why they did, or whose they are.

By what probes_offload and probes_traffic saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lab.judge import harmless


@harmless
def of_values(run: Callable, rng, came_back: Callable) -> str:
    """What backward gets of a tensor that was kept: as it was, or rounded on the way."""
    pairs = run(came_back, rng.normal(24, 16), device="simulated")
    kept, got = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    if torch.equal(kept, got):
        return "; what layers keep comes back as it was: is it each one's own, and there in time?"
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(kept.to(dtype).to(kept.dtype), got):
            name = str(dtype)[6:]
            return f": backward gets what layers kept, rounded to {name}: it was that on the way to the host or back"
    return f"; what backward gets differs from what layers kept by up to {(kept - got).abs().max():.3g}"


@harmless
def of_originals(sent: int, storages: int, alive: int, size: int) -> str:
    """What became of the tensors that were copied to the host."""
    if not sent:
        return "; nothing was copied to the host"
    told = f"; {sent} tensors with {storages} storages were copied to the host, and "
    if not alive:
        return f"{told}these are gone from the device: what is left was not sent"
    return f"{told}{alive} of these originals, {size:,} bytes, are alive on the device: something refers to them"


@harmless
def of_parameters(owned: Sequence[str]) -> str:
    """Whether parameters travel as they are, or views of them, or both."""
    itself = sum(told.endswith(" itself") for told in owned)
    if not itself:
        return (
            "; all of these are views; none is a parameter that is saved as it is, as gain is: a view is another "
            "object, what it shares with its parameter is the storage"
        )
    return f"; {itself} of these are parameters as they are, {len(owned) - itself} are views of them"


@harmless
def of_layers(tensors: Sequence[int], kept: Sequence[int], running: int) -> str:
    """Whose the tensors on the device are, in the second half of a layer's backward, by their sizes."""
    told = []
    for layer, numbers in enumerate(kept):
        there, least, most = tensors.count(4 * numbers), *{running: (1, 2), running - 1: (2, 2)}.get(layer, (0, 0))
        if not least <= there <= most:
            state = "is over" if layer > running else "runs" if layer == running else "is next"
            state = "comes later" if layer < running - 1 else state
            told.append(f"{there} tensors of layer {layer}, whose backward {state} ({4 * there * numbers:,} bytes)")
    of_none = sum(size for size in tensors if size > 64 and size not in [4 * numbers for numbers in kept])
    if of_none:
        told.append(f"{of_none:,} bytes in tensors of another size than any layer keeps")
    return f"; instead, on the device: {', '.join(told)}" if told else ""


@harmless
def fetched(log, sizes, rows: int) -> str:
    """Whose tensors came during whose backward."""
    whose, running = {rows * size: layer for layer, size in enumerate(sizes)}, len(sizes) - 1
    during: dict[int, list[int]] = {layer: [] for layer in range(len(sizes))[::-1]}
    for what, n, _ in log:
        if what == "backward":
            running = n
        elif what == "fetch" and n in whose and whose[n] not in during[running]:
            during[running].append(whose[n])
    came = (f"of {layer}: {' '.join(map(str, those)) or 'none'}" for layer, those in during.items())
    first = len(sizes) - 1
    return f"; layers fetched in the backward {', '.join(came)} (expected: {first} {first - 1}, then {first - 2}, …)"


@harmless
def of_copies(traffic, phase: str) -> str:
    """Where copies ran, and what the host did meanwhile."""
    t = traffic[phase]
    copies, on_work, held, elsewhere = t["copies"], t["on_work"], t["held"], t["stood"] - t["held"]
    if 0 < on_work < copies:
        told = f": {on_work} of {copies} copies ran on the stream of the work"
    else:
        told = f": all {copies} copies ran on {'the stream of the work' if on_work else 'a side stream'}"
    asked = " and ".join(f"{n} times {how} without non_blocking=True" for how, n in t["blocking"].items())
    if not t["stood"]:
        return f"{told}, the host waited for none{of_waits(traffic, phase) if not on_work else ''}"
    told += f", the host waited in {held} of them" if held else ", the host waited in none of them"
    told += f" ({asked}; host memory counts as pinned here)" if held else ""
    told += f" and {elsewhere} times elsewhere" if elsewhere else ""
    return f"{told}, {1e6 * t['stood_s']:.0f} µs in all"


@harmless
def of_waits(traffic, phase: str) -> str:
    """Which stream waited for which, and how often."""
    told = "; ".join(f"{who}: {n} times" for who, n in traffic[phase]["waits"].items())
    return f"; who waited: {told}" if told else "; no stream waited for another"
