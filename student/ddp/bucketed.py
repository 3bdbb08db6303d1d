"""Data parallelism as libraries do it: gradients travel in buckets, each as soon as it is full."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from .naive import NaiveDDP


class BucketedDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one asynchronous all-reduce per bucket.

    Construct and use it like `NaiveDDP`. Buckets are filled with the parameters that require gradients, in reverse
    order, because backward reaches the last layer first. A parameter that does not fit into the current bucket, or has
    another dtype, opens the next bucket. A bucket is sent as soon as the last of its gradients has been accumulated.
    Source: Li et al. 2020, "PyTorch Distributed", sections 3.2.2 to 3.2.4.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20, group: dist.ProcessGroup | None = None):
        """Wrap `module`. bucket_bytes: maximum size of a bucket; a larger parameter gets a bucket of its own.

        Raises ValueError unless bucket_bytes ≥ 1.
        """
        raise NotImplementedError("ddp.bucketed: Wrap `module`")

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the module's output. In training mode, first broadcast the buffers of rank 0."""
        raise NotImplementedError("ddp.bucketed: Return the module's output")

    def finish_gradient_synchronization(self) -> None:
        """Send the remaining buckets and wait for all of them; then each gradient is its mean over the group.

        If some parameters of a bucket received no gradient (on all ranks), the bucket never filled up, and is sent
        here, with or without zeros in their places. Their .grad stays as it was: None, or the zeros of zero_grad().
        A bucket in which every .grad is None is not sent. Gradients accumulated under no_sync() are sent, even those of
        parameters that the last backward did not reach.
        """
        raise NotImplementedError("ddp.bucketed: Send the remaining buckets and wait for all of them")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only accumulate inside this context; the first backward after it sends the sums.

        Contexts nest: backward accumulates until the outermost one ends. An exception ends a context, too.

        Outside of it, call backward once per synchronization. A second call raises RuntimeError, because it would add
        to gradients that are being sent.
        """
        raise NotImplementedError("ddp.bucketed: Let backward only accumulate inside this context")
