"""Which experts each token goes to, how much each of them counts, and what keeps them equally busy."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Routing:
    """What the router decided for its tokens."""

    experts: Tensor  # (tokens, k) int64, the most probable first
    gates: Tensor  # (tokens, k), their probabilities: what their outputs are multiplied by
    balance: Tensor  # (), the balancing loss


def route(
    logits: Tensor, k: int, *, group: dist.ProcessGroup | None = None, averaged_over: int | None = None
) -> Routing:
    """Choose the k most probable experts of each token, and measure how evenly a batch is spread over all of them.

    logits: (tokens, n), any floating dtype, of this rank's tokens, perhaps none. Probabilities p = softmax(logits) are
    in float32 (float64 for float64 logits), over all n experts. Gates are those of the chosen, not normalised again:
    with k = 1 a gate that is always 1 would teach the router nothing. Of equal logits the expert of the lower number
    comes first, on every device.

    The balancing loss is that of the whole batch, all ranks' tokens as one, and has the same value on every rank:
    (7) n · Σ_e f_e · P_e, with f_e the share of all tokens · k choices that fell on expert e, which has no gradient,
    and P_e the mean of p_e over all tokens. It is 1 where both are even, n where one expert has all, and, not 0 / 0,
    0 where no rank has a token. A mean of the ranks' own losses is something else: a mean of products is not the
    product of means.

    group: the ranks that hold other tokens of the batch (data×expert; with sequence parallelism tensor as well), who
    may have more or fewer; None: there are none, and nothing is sent. One all-reduce of at most 2n + 1 numbers.

    Afterwards gradients are *averaged* over ranks: summed, and divided by `averaged_over` (None: the group's size). So
    that this mean is the gradient of (7), backward gives the logits here averaged_over times their part of it, and need
    not send anything. Where ranks of the group are only summed over, as tensor is, give the number that is divided by.

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
