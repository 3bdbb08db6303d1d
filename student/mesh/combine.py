"""Send the results of experts back to their tokens, weighted by the gates."""

import torch.distributed as dist
from torch import Tensor

from .dispatch import Dispatched


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
    raise NotImplementedError(
        "mesh.combine: Send each row of the experts back to the rank of its token, and add up the weighted choices of …"
    )
