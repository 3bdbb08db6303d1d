"""What training comes to that goes on with something lost or misplaced: in float64, one process, on each mesh anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import safetensors.torch
import torch
from torch import Tensor

from lab.judge import Suspects, harmless
from lab.listing import some

from .probes_placed import cut_along, part_of

Change = Callable[[dict, torch.optim.Optimizer, int], None]


def resumed(name: str, options: dict, values: dict, sessions: Sequence[list], change: Change) -> dict:
    """Parameters after all sessions; change(parameters, optimizer, number) is made before each but the first."""
    parameters = {n: torch.nn.Parameter(v.double()) for n, v in values.items()}
    optimizer = getattr(torch.optim, name)(parameters.values(), **options)
    for number, gradients in enumerate(sessions):
        if number:
            change(parameters, optimizer, number)
        for whole in gradients:
            for n, parameter in parameters.items():
                parameter.grad = whole[n].double() if n in whole else None
            optimizer.step()
    return {n: p.detach() for n, p in parameters.items()}


def of_loaded(has: dict, key: str, name: str, place: int, ranks: int, start: int, count: int, before: int) -> Suspects:
    """What a piece of the parameter `name` may be, or of its state at `key`, of which `has` the whole, by key and name.

    place: of this rank, of `ranks` on tensor; before: how many there were when it was saved.
    """
    saved, here = has[key], slice(start, start + count)
    whole = saved[name]

    def flat(name: str, whole: Tensor, place: int = place) -> Tensor:
        return part_of(name, whole, place, ranks).flatten()

    if start:
        yield "it is what begins at 0 of the part: from piece.start on", flat(name, whole)[:count]
    for other in (n for n in saved if n != name):
        rule = "a state is its parameter's, whatever the order of placements" if key else "each is from piece.offset on"
        yield f"it is that of {other}: {rule}", flat(other, saved[other])[:count]
    for other_place in (p for p in range(ranks) if p != place):
        cause = f"it is part {other_place} of the whole: this rank has part {place}"
        yield cause, flat(name, whole, other_place)[here]
    if cut_along(name, before) == 1:
        rows = torch.cat([part.flatten() for part in whole.chunk(before, 1)]).view(whole.shape)
        cause = "parts that are columns are put together as if they were rows: along the dim of the piece"
        yield cause, flat(name, rows)[here]


@harmless
def holding(files: dict, true: Tensor, lost: Tensor) -> str:
    """In which files of a checkpoint what was lost lies, and in which what was not. files: bytes, by name."""
    within = {}
    for path, data in sorted(files.items()):
        if path.endswith(".safetensors"):
            numbers = torch.cat([t.double().flatten() for t in safetensors.torch.load(bytes(data.tolist())).values()])
            there = torch.isclose(true.double()[:, None], numbers, rtol=1e-5, atol=0.0).any(1)
            within[path] = int((there & lost).sum()), int((there & ~lost).sum())
    gone = [path for path, (missing, right) in within.items() if missing and not right]
    if not gone or sum(within[path][0] for path in gone) < int(lost.sum()):
        return ""
    right = [path for path, (missing, right) in within.items() if right]
    return f"all of them lie in {some(gone)}, of which nothing came; what came lies in {some(right) or 'none'}"


def of_training(
    name: str, options: dict, other: dict, values: dict, sessions: Sequence[list], meshes: Sequence[dict]
) -> Suspects:
    """(cause, parameters by name): what they may be on the last of `meshes` (degrees). other: options it began with."""

    def counted_anew(parameters, optimizer, number) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()

    def set_to(changed: dict) -> Change:
        def change(parameters, optimizer, number) -> None:
            optimizer.param_groups[0].update({k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()})

        return change

    usual = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1))]).defaults
    defaults = {key: usual[key] for key in options}
    changes: list[tuple[str, Change]] = [
        ("the count of steps begins anew, and Adam's bias correction with it", counted_anew),
        ("hyperparameters are those that the optimizer was made with here: load them", set_to(other)),
        ("what was saved are the optimizer's .defaults, not the hyperparameters in its param_groups", set_to(defaults)),
        *(
            (f"{key} is the one that the optimizer was made with, not that of param_groups when it was saved", change)
            for key in options
            for change in (set_to({key: other[key]}), set_to({key: defaults[key]}))
        ),
    ]
    for cause, change in changes:
        yield cause, resumed(name, options, values, sessions, change)
