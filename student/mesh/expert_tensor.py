"""Expert-tensor parallelism: each expert cut over ranks, beside whole experts on different ranks or in their place."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn


class TensorParallelExperts(nn.ModuleDict):
    """A layer's experts, of each of which this rank has 1/T of the hidden units: the same rows in, the same rows out.

    It takes the place of `Experts`, which moe.py gives, where experts are few, or large. All T ranks of `group` are
    given the same rows, as the ranks of `tensor` are without sequence parallelism, and return the same rows; they
    differ from those that `Experts` returns by rounding alone. Names of parameters stay. Gradients are those of this
    rank's parts, whole: nothing is to be summed over `group`.

    However many experts there are, and however rows are shared among them, what is sent is one all-reduce of (arrived,
    width) forward and one backward, in the dtype of the rows. Two experts of width 1,024 and hidden 4,096 in float32,
    100 MB, are 25 MB on each of 4 ranks; 2,048 rows cost 2 · 3/4 · 8 MiB = 12 MiB sent, forward and again backward.
    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE" (expert-slicing); Singh et al. 2023, "DeepSpeed-TED".
    """

    def __init__(self, experts: nn.ModuleDict, group: dist.ProcessGroup | None = None):
        """Keep this rank's part of `experts`, which are the same on every rank of group, and nothing of the rest.

        Raises ValueError where the group's size does not divide the number of hidden units.
        """
        raise NotImplementedError(
            "mesh.expert_tensor: Keep this rank's part of `experts`, which are the same on every rank of group, and …"
        )

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens (arrived, width), grouped by expert, counts of each, which may be 0; returns (arrived, width)."""
        raise NotImplementedError(
            "mesh.expert_tensor: tokens (arrived, width), grouped by expert, counts of each, which may be 0"
        )
