"""ZeRO-3 with prefetching: the next layer is gathered while this one computes."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .fsdp_gather import FSDP, Unit


class FSDPPrefetch(FSDP):
    """FSDP that prefetches one layer in forward and backward, and overlaps reduce-scatters with backward.

    Construct and use it like `FSDP`; it sends the same messages, earlier. Before a layer computes, start to gather the
    layer that followed it last time, in forward or backward, and do not wait for it. Each forward and each backward
    learns the order: the second run in a new order prefetches in that order. Once the order is known, at most one layer
    is whole and one is being gathered. A gathered layer that was not needed is freed when forward returns, or in
    `finish_gradient_synchronization()`. Wait for a reduce-scatter when the next one starts, and for the last one in
    `finish_gradient_synchronization()`, so at most one layer's whole gradient is waiting.
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
        """Same arguments as `FSDP`."""
        raise NotImplementedError("zero.fsdp_prefetch: Same arguments as `FSDP`")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the same arguments."""
        raise NotImplementedError("zero.fsdp_prefetch: Return the module's output for the same arguments")

    def finish_gradient_synchronization(self) -> None:
        """Do the same as in `FSDP`; when it returns, the gradients of the shards are complete."""
        raise NotImplementedError("zero.fsdp_prefetch: Do the same as in `FSDP`")

    def before_forward(self, layer: nn.Module) -> None:
        """Gather the layer's units and prefetch the next layer, except in a forward that backward runs again."""
        raise NotImplementedError(
            "zero.fsdp_prefetch: Gather the layer's units and prefetch the next layer, except in a forward that …"
        )

    def before_backward(self, layer: nn.Module) -> None:
        """Gather the layer's units, and prefetch the layer before it."""
        raise NotImplementedError("zero.fsdp_prefetch: Gather the layer's units, and prefetch the layer before it")

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Wait for the previous reduce-scatter, then start this one."""
        raise NotImplementedError("zero.fsdp_prefetch: Wait for the previous reduce-scatter, then start this one")
