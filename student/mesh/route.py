"""Which experts each token goes to, how much each of them counts, and what keeps them equally busy."""

from dataclasses import dataclass

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
    raise NotImplementedError(
        "mesh.route: Choose the k most probable experts of each token, and measure how evenly a batch is spread over …"
    )
