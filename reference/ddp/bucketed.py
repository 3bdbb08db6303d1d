"""Data parallelism as it is done: gradients travel in buckets, each as soon as it is full."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .naive import NaiveDDP


class BucketedDDP(NaiveDDP):
    """A replica of `module` on each rank of `group`, kept equal by one asynchronous all-reduce a bucket.

    Built and used as `NaiveDDP`. Buckets are filled with parameters in reverse order, since backward reaches the last
    layer first; all of a bucket have one dtype. A bucket is sent when the last of its gradients has been accumulated.
    Source: Li et al. 2020, "PyTorch Distributed", sections 3.2.2 to 3.2.4.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20, group: dist.ProcessGroup | None = None):
        """Wrap `module`. bucket_bytes: the most that a bucket holds, but a larger parameter has one of its own.

        Raises ValueError unless bucket_bytes ≥ 1.
        """
        if bucket_bytes < 1:
            raise ValueError(f"expected bucket_bytes >= 1, got {bucket_bytes}")
        super().__init__(module, group)
        self.synchronizing = True
        self.buckets: list[_Bucket] = []
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or not self.buckets[-1].fits(parameter, bucket_bytes):
                self.buckets.append(_Bucket(group))
            bucket = self.buckets[-1]
            bucket.parameters.append(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._accumulated(bucket))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """What `module` returns; in training mode its buffers are rank 0's first."""
        if self.module.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.detach(), group_src=0, group=self.group)
        return super().forward(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Send what has not been sent, wait for all of it, and let each gradient be its mean over the group.

        A bucket of which some parameters received no gradient (on all ranks) could not fill up, and is sent here with
        those that did; the others keep None.
        """
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.send()
        for bucket in self.buckets:
            bucket.receive()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; the first backward after it sends the sums."""
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True

    def _accumulated(self, bucket: "_Bucket") -> None:
        if self.synchronizing:
            bucket.ready += 1
            if bucket.ready == len(bucket.parameters):
                bucket.send()


class _Bucket:
    """Parameters that travel together."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.parameters = group, list[nn.Parameter]()
        self.ready = 0  # gradients accumulated since the last step
        self.work: dist.Work | None = None
        self.sent: list[tuple[nn.Parameter, Tensor]] = []  # with the view of the buffer that holds its gradient

    def fits(self, parameter: nn.Parameter, limit: int) -> bool:
        """Whether one more would still be within the limit."""
        size = sum(p.numel() * p.element_size() for p in [*self.parameters, parameter])
        return parameter.dtype == self.parameters[0].dtype and size <= limit

    def send(self) -> None:
        """Start the mean of what has a gradient."""
        present = [p for p in self.parameters if p.grad is not None]
        if not present:
            return
        buffer = torch.cat([p.grad.flatten() for p in present if p.grad is not None])
        buffer.div_(dist.get_world_size(self.group))  # before SUM: the sum of large fp16 gradients overflows
        pieces = buffer.split([p.numel() for p in present])
        self.sent = [(p, piece.view_as(p)) for p, piece in zip(present, pieces, strict=True)]
        self.work = dist.all_reduce(buffer, group=self.group, async_op=True)

    def receive(self) -> None:
        """Wait for it; gradients are views of the buffer from now on."""
        if self.work is not None:
            self.work.wait()
        for parameter, mean in self.sent:
            parameter.grad = mean
        self.ready, self.work, self.sent = 0, None, []
