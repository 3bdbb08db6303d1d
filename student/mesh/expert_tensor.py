"""Expert-tensor parallelism: each expert sharded over ranks, with or without expert parallelism."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn


class TensorParallelExperts(nn.ModuleDict):
    """A layer's experts, with 1/T of the hidden units of each expert on this rank.

    It replaces `Experts` of moe.py if experts are few or large. All T ranks of `group` get the same rows, as the ranks
    of `tensor` do without sequence parallelism, and return the same rows. The results differ from those of `Experts`
    only by rounding. Parameter names stay. Gradients of this rank's parts are complete: do not sum them over `group`.

    For any number of experts, and any distribution of rows, there is one all-reduce of (arrived, width) in forward and
    one in backward, in the dtype of the rows. Example: two experts of width 1,024 and hidden 4,096 in float32 take 100
    MB, or 25 MB on each of 4 ranks. 2,048 rows cost 2 · 3/4 · 8 MiB = 12 MiB sent in forward, and again in backward.
    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE" (expert-slicing); Singh et al. 2023, "DeepSpeed-TED".
    """

    def __init__(self, experts: nn.ModuleDict, group: dist.ProcessGroup | None = None):
        """Keep this rank's part of `experts`, which are equal on every rank of group, and nothing else of them.

        Raises ValueError if the group's size does not divide the number of hidden units.
        """
        raise NotImplementedError(
            "mesh.expert_tensor: Keep this rank's part of `experts`, which are equal on every rank of group, and …"
        )

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens (arrived, width), grouped by expert, counts of each, which may be 0; returns (arrived, width)."""
        raise NotImplementedError(
            "mesh.expert_tensor: tokens (arrived, width), grouped by expert, counts of each, which may be 0"
        )
