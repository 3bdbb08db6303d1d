"""ZeRO-3 that does not wait: the next layer is on its way while this one computes."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_gather import FSDP, Unit


class FSDPPrefetch(FSDP):
    """FSDP that gathers one layer ahead, forward and backward, and waits for no reduce-scatter in between.

    Built and used as `FSDP`; it sends the same, earlier. Before a layer computes, the gather of the layer that came
    after it the last time, forward or backward, is started and not waited for: the first forward and the first backward
    learn the order. So one layer is whole and one is on its way, never more; what turns out not to be needed is given
    up when forward returns. The reduce-scatter of a gradient is waited for when the next one is started, so that no
    more than one layer's whole gradient waits, and the last in `finish_gradient_synchronization()`.
    Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Iterable[nn.Module] | None = None,
        small: int = 1024,
    ):
        """As `FSDP`."""
        raise NotImplementedError("zero.fsdp_prefetch: As `FSDP`")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `module` returns for the same arguments."""
        raise NotImplementedError("zero.fsdp_prefetch: What `module` returns for the same arguments")

    def finish_gradient_synchronization(self) -> None:
        """As in `FSDP`; when it returns, the shards' gradients are complete."""
        raise NotImplementedError("zero.fsdp_prefetch: As in `FSDP`")

    def before_forward(self, layer: nn.Module) -> None:
        """Gather the layer's units, and start on the next layer's; not where backward runs a forward again."""
        raise NotImplementedError("zero.fsdp_prefetch: Gather the layer's units, and start on the next layer's")

    def before_backward(self, layer: nn.Module) -> None:
        """Gather the layer's units, and start on those of the layer before."""
        raise NotImplementedError(
            "zero.fsdp_prefetch: Gather the layer's units, and start on those of the layer before"
        )

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Start the mean over the group, having waited for the one before."""
        raise NotImplementedError("zero.fsdp_prefetch: Start the mean over the group, having waited for the one before")
