"""Results of experts back to their tokens, weighted by the gates."""

import torch.distributed as dist
from torch import Tensor

from .dispatch import Dispatched


def combine(y: Tensor, gates: Tensor, dispatched: Dispatched, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Send each expert's rows back to where their tokens came from, and add up a token's choices, weighted.

    y: (arrived, width), what the experts made of `dispatched.tokens`, row by row; the width may be another than
    theirs. gates: (tokens, k), in any floating dtype. group: the one that `dispatch` was given. Returns (tokens, width)
    in the dtype of y, tokens in the order that dispatch was given them: Σ_c gates[t, c] · result of choice c, products
    and sums in the wider dtype of both. A choice that was dropped adds nothing: a token that lost all of them gets
    zeros, so that the residual connection around the layer passes it on unchanged, and its gates get no gradient.

    Rows go as they are, in y's dtype, by one all-to-all, and in backward by another: who sent them knows what they are
    and what they weigh, so that neither numbers nor gates need be sent.
    """
    raise NotImplementedError(
        "mesh.combine: Send each expert's rows back to where their tokens came from, and add up a token's choices, …"
    )
