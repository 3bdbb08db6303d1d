"""Checks that messages hold this rank's own gradients. Right results alone do not show how a sum was computed."""

import torch
from torch import Tensor

from lab.course.listing import some
from lab.harness.named import number_of

TOLERANCE = 1e-2  # tolerance relative to the largest value: deep chains amplify rounding
SUM_OPS = ("all_reduce", "reduce_scatter")  # operations that begin a sum over ranks


def check_own_gradients(what: str, record: dict, world: int) -> None:
    """Assert that each gradient of this rank was sent in the step, unchanged or divided by W.

    A message may hold several gradients in any order, and other data. Several messages may also hold one gradient.
    record: a step with "rows", "payloads", and "own": this rank's gradients by name, in float64 and from a plain
    computation. Adds "carries" to each row: the names of the gradients in it. If no gate proves that a row of phase
    "backward" left during backward, its phase becomes "finish".
    """
    exact, plain = ({name: g for name, g in gradients.items() if g is not None} for gradients in record["own"])
    for row in record["rows"]:
        row["carries"] = []
    sums = [(row, payload.double()) for row, payload in zip(record["rows"], record["payloads"], strict=True)
            if row["op"] in SUM_OPS and payload is not None]  # fmt: skip
    free = [torch.ones(len(payload), dtype=torch.bool) for _, payload in sums]
    missing = []
    for name in sorted(exact, key=lambda name: -exact[name].numel()):
        values = exact[name].double().flatten()
        error = float((plain[name].double().flatten() - values).abs().max())
        allowed = max(TOLERANCE * float(values.abs().max()), 15 * error)
        matches = [(*match, i, divisor) for i, (_, payload) in enumerate(sums) for divisor in {1, world}
                  if (match := _find(payload, values / divisor, free[i], allowed / divisor))]  # fmt: skip
        if matches:
            _, start, i, _ = min(matches)
            free[i][start : start + len(values)] = False
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

    # After the last layer's gate, backward computes only that layer's gradients; other rows may have left in finish.
    last_layer, sent = record["marks"][-1]
    for row in record["rows"][sent:]:
        if row["phase"] == "backward" and row["carries"] and last_layer not in map(number_of, row["carries"]):
            row["phase"] = "finish"


def late_reductions(record: dict) -> list[tuple[dict, int]]:
    """Return [(row, layer)] of the reductions that left late. layer: the layer of the row's last gradient.

    A reduction is late if it left after the next gate: after backward had reached the next layer, or its end.
    """
    layers = [layer for layer, _ in record["marks"]]
    end = next((i for i, row in enumerate(record["rows"]) if row["phase"] == "finish"), len(record["rows"]))
    limits = [*(count for _, count in record["marks"][1:]), end]
    late = []
    for i, row in enumerate(record["rows"]):
        positions = [layers.index(number_of(name)) for name in row["carries"]]
        if positions and i >= limits[max(positions)]:
            late.append((row, layers[max(positions)]))
    return late


def _find(payload: Tensor, values: Tensor, free: Tensor, allowed: float) -> tuple[float, int] | None:
    """Return (error, position) of the free elements closest to `values`; None if none are within `allowed`."""
    spare = len(payload) - len(values)
    if spare < 0 or not len(values):
        return None
    largest = int(values.abs().argmax())
    candidates = (payload[largest : largest + spare + 1] - values[largest]).abs() <= allowed
    errors = [
        (float((payload[start : start + len(values)] - values).abs().max()), start)
        for start in candidates.nonzero().flatten().tolist() if free[start : start + len(values)].all()
    ]  # fmt: skip
    return min((error for error in errors if error[0] <= allowed), default=None)


def _pieces(sums: list, values: Tensor, free: list[Tensor], allowed: float) -> list[int]:
    """Return the indices of unused messages that together hold these values, piece after piece; [] if none do."""
    pieces: list[int] = []
    start = 0
    while start < len(values):
        candidates = [
            (-len(payload), error, i)  # the longest first: a few zeros match anywhere
            for i, (_, payload) in enumerate(sums)
            if 0 < len(payload) <= len(values) - start and i not in pieces and free[i].all()
            and (error := float((payload - values[start : start + len(payload)]).abs().max())) <= allowed
        ]  # fmt: skip
        if not candidates:
            return []
        length, _, i = min(candidates)
        pieces.append(i)
        start -= length
    return pieces
