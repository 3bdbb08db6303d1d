"""A sharded vocabulary: each rank embeds and scores its own part of it. The whole logits never exist."""

import torch
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
        super().__init__()
        self.group, self.leave = group, leave
        rows = padded(embedding.weight, group).chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.weight = nn.Parameter(rows.clone(), requires_grad=embedding.weight.requires_grad)

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply `leave` to this rank's rows, (batch, context, width). tokens: (batch, context), any of the vocabulary.

        Rows of other ranks' tokens are 0 here, so the sum contains each token's row once.
        """
        index, is_local = _local_index(tokens, len(self.weight), self.group)
        rows = F.embedding(index, self.weight).masked_fill(~is_local[..., None], 0.0)  # (batch, context, width)
        return self.leave(rows, self.group)


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
    n = logits.shape[-1]
    columns = torch.arange(n, device=logits.device) + n * dist.get_rank(group)
    logits = logits.float().masked_fill(columns >= vocabulary, float("-inf"))
    maximum = logits.detach().amax(dim=-1)  # (batch, context)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    logits = logits - maximum[..., None]

    index, is_local = _local_index(targets, n, group)
    target = logits.gather(-1, index[..., None]).squeeze(-1).masked_fill(~is_local, 0.0)  # (batch, context)
    sums, target = reduce_from(torch.stack([logits.exp().sum(dim=-1), target]), group)
    return (sums.log() - target).mean()


def _local_index(tokens: Tensor, n: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the index of each token among this rank's n (0 for tokens of other ranks), and whether it is its own."""
    index = tokens - n * dist.get_rank(group)
    is_local = (index >= 0) & (index < n)
    return index.where(is_local, 0), is_local
