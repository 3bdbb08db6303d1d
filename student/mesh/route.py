"""Choose the experts of each token and their gates, and compute the loss that balances the experts."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Routing:
    """The decision of the router for its tokens."""

    experts: Tensor  # (tokens, k) int64, the most probable first
    gates: Tensor  # (tokens, k), their probabilities: what their outputs are multiplied by
    balance: Tensor  # (), the balancing loss


def route(
    logits: Tensor, k: int, *, group: dist.ProcessGroup | None = None, averaged_over: int | None = None
) -> Routing:
    """Choose the k most probable experts of each token, and measure how evenly the batch is divided over experts.

    logits: (tokens, n), any floating dtype, for this rank's tokens (perhaps none). Probabilities p = softmax(logits)
    are float32 (float64 for float64 logits), over all n experts. Gates are the probabilities of the chosen experts, not
    normalised again: with k = 1, a gate that is always 1 would teach the router nothing. Among equal logits, the expert
    with the lower number comes first.

    The balancing loss covers the whole batch, over the tokens of all ranks, and has the same value on every rank:
    (7) n · Σ_e f_e · P_e. f_e is the share of all tokens · k choices that fall on expert e; it has no gradient. P_e is
    the mean of p_e over all tokens. The loss is 1 if both are even, n / k if one expert has all probability, and 0 (not
    0 / 0) if no rank has a token. A mean of the ranks' own losses differs: a mean of products is not the product of
    means.

    group: the ranks that hold other tokens of the batch (data×expert; with sequence parallelism also tensor), perhaps
    different numbers of them. None: there are none, and nothing is sent. Use one all-reduce of at most 2n + 1 numbers.

    Later, gradients are *averaged* over ranks: summed, and divided by `averaged_over` (None: the group's size). So
    backward multiplies this rank's part of the gradient of (7) by averaged_over; the later division cancels the factor.
    Backward sends nothing. If some ranks of the group are only summed over, such as tensor, pass the number that the
    sum is divided by.

    Raises ValueError unless 1 <= k <= n.
    Source: Fedus, Zoph and Shazeer 2021, "Switch Transformers", section 2.2, equations 4 to 6.
    """
    raise NotImplementedError(
        "mesh.route: Choose the k most probable experts of each token, and measure how evenly the batch is divided …"
    )
