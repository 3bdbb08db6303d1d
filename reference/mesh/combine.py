"""Send the results of experts back to their tokens, weighted by the gates."""

import torch.distributed as dist
from torch import Tensor

from .dispatch import Dispatched
from .exchange import exchange


def combine(y: Tensor, gates: Tensor, dispatched: Dispatched, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Send each row of the experts back to the rank of its token, and add up the weighted choices of each token.

    y: (arrived, width), the experts' results for `dispatched.tokens`, row by row; the width may differ from that of the
    tokens. gates: (tokens, k), any floating dtype. group: the group of `dispatch`. Returns (tokens, width) in the dtype
    of y, with tokens in the order in which dispatch got them: Σ_c gates[t, c] · result of choice c. Compute products
    and sums in the wider dtype of both. A dropped choice adds nothing, and its gate gets no gradient. A token with all
    choices dropped gets zeros, so the residual connection around the layer passes it on unchanged.

    Rows travel unweighted, in y's dtype, by one all-to-all in forward and one in backward. The rank that sent a row
    knows its token and its gate, so neither indices nor gates are sent.
    """
    tokens, k = gates.shape
    leaving = y.new_zeros(y.shape).index_copy(0, dispatched.regroup, y)  # as they arrived
    returned = exchange(leaving, dispatched.received, dispatched.sent, group)  # (left, width)
    choices = returned.new_zeros(tokens * k, returned.shape[1]).index_copy(0, dispatched.order, returned)
    weighted = choices.view(tokens, k, returned.shape[1]) * gates[..., None]  # (tokens, k, width)
    return weighted.sum(1).to(y.dtype)
