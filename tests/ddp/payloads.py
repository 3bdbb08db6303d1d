"""Checks that messages carry this rank's own gradients: right results alone do not show how the sum was computed."""

import torch
from torch import Tensor

from lab.course.listing import some
from lab.harness.named import number_of

NEAR = 1e-2  # tolerance relative to the largest value: deep chains amplify rounding
SUMS = ("all_reduce", "reduce_scatter")  # operations that begin a sum over ranks


def carries_own(what: str, told: dict, world: int) -> None:
    """Assert that each gradient of this rank is in one message of the step, unchanged or divided by W.

    A message may hold several gradients in any order, and other data; or several messages may hold one gradient.
    told: a step with its "rows", "payloads", and "own": this rank's gradients by name, in float64 and from a plain
    computation. Adds "carries" to each row: the names of the gradients in it; a row of "backward" that nothing proves
    to have left there becomes one of "finish".
    """
    own, plain = ({name: g for name, g in gradients.items() if g is not None} for gradients in told["own"])
    for row in told["rows"]:
        row["carries"] = []
    sums = [(row, payload.double()) for row, payload in zip(told["rows"], told["payloads"], strict=True)
            if row["op"] in SUMS and payload is not None]  # fmt: skip
    free = [torch.ones(len(payload), dtype=torch.bool) for _, payload in sums]
    missing = []
    for name in sorted(own, key=lambda name: -own[name].numel()):
        values = own[name].double().flatten()
        error = float((plain[name].double().flatten() - values).abs().max())
        allowed = max(NEAR * float(values.abs().max()), 15 * error)
        places = [(*place, i, divisor) for i, (_, payload) in enumerate(sums) for divisor in {1, world}
                  if (place := _find(payload, values / divisor, free[i], allowed / divisor))]  # fmt: skip
        if places:
            _, at, i, _ = min(places)
            free[i][at : at + len(values)] = False
            sums[i][0]["carries"].append(name)
        elif pieces := next(filter(None, (_pieces(sums, values / d, free, allowed / d) for d in (1, world))), None):
            for i in pieces:
                free[i][:] = False
                sums[i][0]["carries"].append(name)
        else:
            missing.append(name)
    assert not missing, (
        f"{what}: the gradients are right, but none of the {len(sums)} messages that sum over ranks carried this "
        f"rank's own gradient of {some(missing)}: send each gradient itself, as it is or divided by {world}"
    )

    # After the gate of its last layer, only that layer's gradients need a backward: others may have left at any time.
    last, reached = told["marks"][-1]
    for row in told["rows"][reached:]:
        if row["phase"] == "backward" and row["carries"] and last not in map(number_of, row["carries"]):
            row["phase"] = "finish"


def left_late(told: dict) -> list[tuple[dict, int]]:
    """The reductions that a step sent only after backward had moved on, each with the layer of its last gradient.

    Backward has moved on when its gates show that it reached the next layer, or its end.
    """
    layers = [layer for layer, _ in told["marks"]]
    ended = next((i for i, row in enumerate(told["rows"]) if row["phase"] == "finish"), len(told["rows"]))
    goes_on = [*(count for _, count in told["marks"][1:]), ended]
    late = []
    for i, row in enumerate(told["rows"]):
        places = [layers.index(number_of(name)) for name in row["carries"]]
        if places and i >= goes_on[max(places)]:
            late.append((row, layers[max(places)]))
    return late


def _find(payload: Tensor, values: Tensor, free: Tensor, allowed: float) -> tuple[float, int] | None:
    """(error, position) of the free elements closest to these values; None if none are within `allowed`."""
    spare = len(payload) - len(values)
    if spare < 0 or not len(values):
        return None
    largest = int(values.abs().argmax())
    near = (payload[largest : largest + spare + 1] - values[largest]).abs() <= allowed
    errors = [
        (float((payload[at : at + len(values)] - values).abs().max()), at)
        for at in near.nonzero().flatten().tolist() if free[at : at + len(values)].all()
    ]  # fmt: skip
    return min((error for error in errors if error[0] <= allowed), default=None)


def _pieces(sums: list, values: Tensor, free: list[Tensor], allowed: float) -> list[int]:
    """Indices of unused messages that together are these values, one piece after the other; [] if there are none."""
    pieces: list[int] = []
    at = 0
    while at < len(values):
        fits = [
            (-len(payload), error, i)  # the longest, since any few zeros look like others
            for i, (_, payload) in enumerate(sums)
            if 0 < len(payload) <= len(values) - at and i not in pieces and free[i].all()
            and (error := float((payload - values[at : at + len(payload)]).abs().max())) <= allowed
        ]  # fmt: skip
        if not fits:
            return []
        length, _, i = min(fits)
        pieces.append(i)
        at -= length
    return pieces
