"""A sharded vocabulary: each rank embeds and scores its own part of it. The whole logits never exist."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lab.provided import provided

from .conjugates import Conjugate, reduce_from


@provided
def padded(weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `weight`, (vocabulary, width), padded with zero rows to a multiple of the group's size."""
    missing = -len(weight) % dist.get_world_size(group)
    return F.pad(weight.detach(), (0, 0, 0, missing))


class VocabParallelEmbedding(nn.Module):
    """An embedding sharded by rows: rank r holds rows r · n to (r + 1) · n − 1, with n = ⌈vocabulary / T⌉.

    `weight` is (n, width); rows beyond the vocabulary are zeros, as `padded` makes them, and never get a gradient.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup | None = None, leave: Conjugate = reduce_from):
        """Keep this rank's rows of `embedding`, and no reference to the rest of it. leave: sums the parts."""
        raise NotImplementedError(
            "mesh.vocab_parallel: Keep this rank's rows of `embedding`, and no reference to the rest of it"
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply `leave` to this rank's rows, (batch, context, width). tokens: (batch, context), any of the vocabulary.

        Rows of other ranks' tokens are 0 here, so the sum contains each token's row once.
        """
        raise NotImplementedError("mesh.vocab_parallel: Apply `leave` to this rank's rows, (batch, context, width)")


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None, *, vocabulary: int
) -> Tensor:
    """Return the mean cross entropy, (), float32, of logits that are sharded over ranks; it is equal on every rank.

    logits: (batch, context, n), this rank's columns, from r · n on. The whole logits have `vocabulary` columns, and
    perhaps more that pad them to n · T; padding has no probability and no gradient. targets: (batch, context), 0 to
    vocabulary − 1. Compute softmax in float32 and subtract the maximum first. Send three numbers per token: the
    maximum, then the sum of exponentials and the target's logit. Backward sends nothing: each rank has the gradient of
    its own columns, softmax − one-hot. Source: Shoeybi et al. 2019, section 3.
    """
    raise NotImplementedError(
        "mesh.vocab_parallel: Return the mean cross entropy, (), float32, of logits that are sharded over ranks"
    )
