"""What a sum over ranks comes to where it is over others, is not made, or is divided by something else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.judge import Suspects


def of_sum(
    part: Sequence[Tensor], here: int, right: Sequence[int], by: float, others: dict, what: str = "the gradient"
) -> Suspects:
    """part: of each rank; right: whose sum it should be, divided by `by`; others: {"over data alone": ranks, …}.

    Of two that are equal the first is told: of ranks that have the same, a sum and a product are.
    """
    expected = f"expected the sum over ranks {list(right)}" + (f", divided by {by:g}" if by != 1 else "")
    others = {"of this rank alone": [here], **others}
    for number in dict.fromkeys((by, 1.0, float(len(right)))):
        divided = "" if number == by else ", undivided" if number == 1 else f", divided by {number:g}"
        for whose, ranks in others.items():
            if sorted(ranks) == sorted(right):
                continue
            yield f"it is {what} {whose}{divided}: {expected}", _summed(part, ranks) / number
            if len(ranks) not in (1, number):
                cause = f"it is {what} {whose}, divided by their number, {len(ranks)}: {expected}"
                yield cause, _summed(part, ranks) / len(ranks)
    for number in dict.fromkeys((1.0, float(len(right)), *(float(len(r)) for r in others.values()))):
        if number != by:
            their = ", their number" if number == len(right) else ""
            cause = f"it is divided by {number:g}{their}" if number != 1 else "it is not divided"
            yield f"over the right ranks, but {cause}: {expected}", _summed(part, right) / number
    for number in dict.fromkeys((len(right), by)):
        if number not in (0, 1):
            yield f"it is summed twice, and counts {number:g} times", _summed(part, right) / by * number
            yield f"it is divided twice: {expected}", _summed(part, right) / by / number


def _summed(part: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    return torch.stack([part[r].double() for r in ranks]).sum(0)
