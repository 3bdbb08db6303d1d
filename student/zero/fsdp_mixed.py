"""ZeRO-3 in mixed precision: keep shards in float32, send and compute in 16 bits."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_gather import FSDP, Unit


class FSDPMixed(FSDP):
    """FSDP whose shards are float32 master weights, and whose layers are gathered and compute in 16 bits.

    Use it like `FSDP`. A shard is cast before it is sent, so a gather moves half the bytes. (Autocast would gather
    float32, and keep its 16-bit copies for backward.) Gradients are divided by W, sent in `reduce_dtype`, and added to
    the float32 gradient of the shard. Source: Zhao et al. 2023, "PyTorch FSDP", section 4.4.
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
        """Shard `module`, whose parameters are float32. reduce_dtype: dtype of sent gradients, compute_dtype if None.

        Every layer is sharded, small ones too, so that all of them compute in compute_dtype. Parameters outside of
        layers stay as they are.
        """
        raise NotImplementedError("zero.fsdp_mixed: Shard `module`, whose parameters are float32")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating-point tensors among the arguments to compute_dtype, and return the module's output."""
        raise NotImplementedError(
            "zero.fsdp_mixed: Cast floating-point tensors among the arguments to compute_dtype, and return the …"
        )

    def message(self, unit: Unit) -> Tensor:
        """Return the shard in compute_dtype."""
        raise NotImplementedError("zero.fsdp_mixed: Return the shard in compute_dtype")

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Add the mean, sent in reduce_dtype, to the shard's float32 gradient."""
        raise NotImplementedError(
            "zero.fsdp_mixed: Add the mean, sent in reduce_dtype, to the shard's float32 gradient"
        )
