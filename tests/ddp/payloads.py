"""Whether messages carry this rank's own gradients: right gradients alone do not say by which way the sum came."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.judge import close
from lab.listing import some

SUMS = ("all_reduce", "reduce_scatter")  # what begins a sum over ranks


def carries_own(what: str, told: dict, world: int) -> None:
    """Assert that each gradient of this rank lies in one message of the step, as it is or divided by W.

    Messages may hold several gradients, in any order, and more beside them. told: a step, with its "rows" and
    "payloads", and in "own" this rank's gradients by name: those of float64, and those of a plain computation. Adds to
    each row, in "carries", the names of the gradients in it.
    """
    own, plain = ({name: g for name, g in gradients.items() if g is not None} for gradients in told["own"])
    for row in told["rows"]:
        row["carries"] = []
    sums = [(row, payload.double()) for row, payload in zip(told["rows"], told["payloads"], strict=True)
            if row["op"] in SUMS and payload is not None]  # fmt: skip
    free = [torch.ones(len(payload), dtype=torch.bool) for _, payload in sums]
    missing, found = [], []
    for name in sorted(own, key=lambda name: -own[name].numel()):
        values = own[name].double().flatten()
        error = 15 * float((plain[name].double().flatten() - values).abs().max())
        places = [(*place, i, divisor) for i, (_, payload) in enumerate(sums) for divisor in {1, world}
                  if (place := _find(payload, values / divisor, free[i], error / divisor))]  # fmt: skip
        if not places:
            missing.append(name)
            continue
        _, at, i, divisor = min(places)
        row, payload = sums[i]
        free[i][at : at + len(values)] = False
        row["carries"].append(name)
        found.append((name, payload[at : at + len(values)].view(own[name].shape) * divisor))
    assert not missing, (
        f"{what}: the gradients are right, but none of the {len(sums)} messages that sum over ranks carried this "
        f"rank's own gradient of {some(missing)}: send each gradient itself, as it is or divided by {world}"
    )
    for name, sent in found:
        close(sent, own[name].double(), plain[name].float(), f"{what}, gradient of {name} as it was sent", factor=15)


def holds(payload: Tensor, values: Tensor) -> bool:
    """Whether these values lie one after the other in what was sent."""
    return _find(payload.double(), values.double().flatten(), torch.ones(len(payload), dtype=torch.bool)) is not None


def _find(payload: Tensor, values: Tensor, free: Tensor, error: float = 0.0) -> tuple[float, int] | None:
    """How far off free elements are that come closest to these values, and where; None where none come near.

    error: of a plain computation, where a thousandth of the largest value is less.
    """
    spare = len(payload) - len(values)
    if spare < 0 or not len(values):
        return None
    largest = int(values.abs().argmax())
    allowed = max(1e-3 * float(values[largest].abs()), error)
    near = (payload[largest : largest + spare + 1] - values[largest]).abs() <= allowed
    errors = [
        (float((payload[at : at + len(values)] - values).abs().max()), at)
        for at in near.nonzero().flatten().tolist() if free[at : at + len(values)].all()
    ]  # fmt: skip
    return min((error for error in errors if error[0] <= allowed), default=None)
