"""Choose the experts of each token and their gates, and compute the loss that balances the experts."""

from dataclasses import dataclass

import torch
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
    tokens, n = logits.shape
    if not 1 <= k <= n:
        raise ValueError(f"expected 1 <= k <= {n}, the number of experts, got k={k}")
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    # torch.topk says nothing of ties: what it picks differs between devices, and between lengths.
    experts = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]  # (tokens, k)

    chosen = torch.zeros_like(probabilities).scatter(1, experts, 1.0).sum(0)  # (n,)
    total = probabilities.sum(0)  # (n,)
    statistics = torch.cat([chosen, total.detach(), total.new_tensor([tokens])])
    if group is not None:
        dist.all_reduce(statistics, group=group)
        averaged_over = averaged_over or dist.get_world_size(group)
    everyones_chosen, everyones_total, everyones_tokens = statistics.split([n, n, 1])
    count = everyones_tokens.clamp(min=1)
    share = everyones_chosen / (k * count)
    # The value of everyone's, the gradient of this rank's own, as many times as gradients will be divided by.
    mine = total * (averaged_over or 1)
    mean = (everyones_total + mine - mine.detach()) / count
    return Routing(experts, probabilities.gather(1, experts), n * (share * mean).sum())
