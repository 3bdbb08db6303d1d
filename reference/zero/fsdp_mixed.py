"""ZeRO-3 in mixed precision: keep shards in float32, send and compute in 16 bits."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

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
        super().__init__(module, group, layers=layers, small=0)
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype or compute_dtype
        for unit in self.units:
            unit.make_room(compute_dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating-point tensors among the arguments to compute_dtype, and return the module's output."""
        args, kwargs = tree_map(self._cast, (args, kwargs))
        return super().forward(*args, **kwargs)

    def message(self, unit: Unit) -> Tensor:
        """Return the shard in compute_dtype."""
        return super().message(unit).to(self.compute_dtype)

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Add the mean, sent in reduce_dtype, to the shard's float32 gradient."""
        super().reduce(unit, gradient.to(self.reduce_dtype))

    def _cast(self, x: Any) -> Any:
        return x.to(self.compute_dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
