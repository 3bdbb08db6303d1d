"""Data parallelism as it is done: gradients travel in buckets, each as soon as it is full."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from .naive import NaiveDDP


class BucketedDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one asynchronous all-reduce a bucket.

    Built and used as `NaiveDDP`. Buckets are filled with parameters that want a gradient, in reverse order, since
    backward reaches the last layer first: one that does not fit into the bucket before it, or has another dtype, opens
    the next. A bucket is sent when the last of its gradients has been accumulated.
    Gradients are views of their bucket's buffer, which lives as long as the wrapper.
    Source: Li et al. 2020, "PyTorch Distributed", sections 3.2.2 to 3.2.4.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20, group: dist.ProcessGroup | None = None):
        """Wrap `module`. bucket_bytes: the most that a bucket holds, but a larger parameter has one of its own.

        Raises ValueError unless bucket_bytes ≥ 1.
        """
        raise NotImplementedError("ddp.bucketed: Wrap `module`")

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """What `module` returns; in training mode its buffers are rank 0's first."""
        raise NotImplementedError("ddp.bucketed: What `module` returns")

    def finish_gradient_synchronization(self) -> None:
        """Send what has not been sent, wait for all of it, and let each gradient be its mean over the group.

        A bucket of which some parameters received no gradient (on all ranks) could not fill up, and is sent here, with
        zeros for those that did not, or without them; their .grad stays what it was: None, or the zeros of zero_grad().
        One in which every .grad is None is not sent. What no_sync() has accumulated is sent, also of parameters that
        the last backward did not reach.
        """
        raise NotImplementedError(
            "ddp.bucketed: Send what has not been sent, wait for all of it, and let each gradient be its mean over …"
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; the first backward after it sends the sums. An exception ends it too.

        One may be within another: backward accumulates until the outer one ends.

        Without it there is one backward a synchronization: another raises RuntimeError, since it would add to what is
        under way.
        """
        raise NotImplementedError("ddp.bucketed: Within it backward only accumulates")
