"""ZeRO-3 in mixed precision: remember in float32, send and compute in 16 bits."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_gather import FSDP, Unit


class FSDPMixed(FSDP):
    """FSDP whose shards are float32 master weights, and whose layers are gathered, and compute, in fewer bits.

    Used as `FSDP`. A shard is cast before it is sent, so a gather moves half the bytes; autocast would gather float32,
    and its copies in 16 bits would be kept for backward. Gradients are divided by W, sent in `reduce_dtype`, and added
    up in the float32 gradient of the shard. Source: Zhao et al. 2023, "PyTorch FSDP", section 4.4.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Iterable[nn.Module] | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype | None = None,
    ):
        """Cut `module`, whose parameters are float32. reduce_dtype: of gradients on their way; compute_dtype if None.

        Every layer is cut, small ones too, so that all of them compute in compute_dtype; what is in no layer stays as
        it is.
        """
        raise NotImplementedError("zero.fsdp_mixed: Cut `module`, whose parameters are float32")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `module` returns for these arguments, their floating-point tensors cast to compute_dtype."""
        raise NotImplementedError(
            "zero.fsdp_mixed: What `module` returns for these arguments, their floating-point tensors cast to …"
        )

    def message(self, unit: Unit) -> Tensor:
        """The shard in compute_dtype."""
        raise NotImplementedError("zero.fsdp_mixed: The shard in compute_dtype")

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Add the mean, sent in reduce_dtype, to the shard's float32 gradient."""
        raise NotImplementedError(
            "zero.fsdp_mixed: Add the mean, sent in reduce_dtype, to the shard's float32 gradient"
        )
