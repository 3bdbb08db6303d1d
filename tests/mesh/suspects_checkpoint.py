"""What training comes to that goes on with something lost or misplaced: in float64, one process, on each mesh anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lab.judge import Suspects

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


def of_training(
    name: str, options: dict, other: dict, values: dict, sessions: Sequence[list], meshes: Sequence[dict]
) -> Suspects:
    """(cause, parameters by name): what they may be on the last of `meshes` (degrees). other: options it began with."""

    def fresh(parameters, optimizer, number) -> None:
        optimizer.state.clear()

    def counted_anew(parameters, optimizer, number) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()

    def unloaded(parameters, optimizer, number) -> None:
        for p in parameters.values():
            p.data.fill_(9.0)

    def set_to(changed: dict) -> Change:
        def change(parameters, optimizer, number) -> None:
            optimizer.param_groups[0].update({k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()})

        return change

    def moved(how: Callable[[str, Tensor, int], Tensor]) -> Change:
        def change(parameters, optimizer, number) -> None:
            for n, p in parameters.items():
                for t in (p.data, *(s for s in optimizer.state.get(p, {}).values() if s.shape == p.shape)):
                    t.copy_(how(n, t.clone(), number))

        return change

    def ranks(number: int) -> int:
        return meshes[number].get("tensor", 1)

    def as_rows(n: str, whole: Tensor, number: int) -> Tensor:
        world = ranks(number - 1)
        if cut_along(n, world) != 1:
            return whole
        return torch.cat([part.flatten() for part in whole.chunk(world, 1)]).view(whole.shape)

    def first_for_all(n: str, whole: Tensor, number: int) -> Tensor:
        dim, world = cut_along(n, ranks(number)), ranks(number)
        if dim is None:
            return whole
        return torch.cat([part_of(n, whole, 0, world)] * world, dim).narrow(dim, 0, whole.shape[dim])

    usual = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1))]).defaults
    defaults = {key: usual[key] for key in options}
    changes: list[tuple[str, Change]] = [
        ("the weights are those it was made with: load them, in place", unloaded),
        ("the optimizer's moments begin anew: its state is saved and loaded, too", fresh),
        ("the count of steps begins anew, and Adam's bias correction with it", counted_anew),
        ("hyperparameters are those that the optimizer was made with here: load them", set_to(other)),
        ("hyperparameters are torch's defaults, not those of param_groups when it was saved", set_to(defaults)),
        *(
            (f"{key} is the one that the optimizer was made with, not that of param_groups when it was saved", change)
            for key in options
            for change in (set_to({key: other[key]}), set_to({key: defaults[key]}))
        ),
        ("parts that are columns are put together as if they were rows: along the dim of the piece", moved(as_rows)),
        ("every tensor rank takes the first part: part `coordinate` of the whole", moved(first_for_all)),
    ]
    for cause, change in changes:
        yield cause, resumed(name, options, values, sessions, change)
