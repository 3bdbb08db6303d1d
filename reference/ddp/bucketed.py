"""Data parallelism as it is done: gradients travel in buckets, each as soon as it is full."""

import contextlib
from collections.abc import Iterator

import torch
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
            parameter.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._accumulated(bucket, p))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """What `module` returns; in training mode its buffers are rank 0's first."""
        if self.module.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.detach(), group_src=0, group=self.group)
        return super().forward(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Send what has not been sent, wait for all of it, and let each gradient be its mean over the group.

        A bucket of which some parameters received no gradient (on all ranks) could not fill up, and is sent here, with
        zeros for those that did not, or without them; their .grad stays what it was: None, or the zeros of zero_grad().
        One in which every .grad is None is not sent. What no_sync() has accumulated is sent, also of parameters that
        the last backward did not reach.
        """
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.send()
        for bucket in self.buckets:
            bucket.receive()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; the first backward after it sends the sums. An exception ends it too.

        One may be within another: backward accumulates until the outer one ends.

        Without it there is one backward a synchronization: another raises RuntimeError, since it would add to what is
        under way.
        """
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def _accumulated(self, bucket: "_Bucket", parameter: nn.Parameter) -> None:
        if bucket.work is not None or parameter in bucket.ready:
            raise RuntimeError(
                "a second backward while gradients of the first are under way: put all but the last under no_sync(), "
                "or call finish_gradient_synchronization() in between"
            )
        bucket.hold(parameter, dist.get_world_size(self.group) if self.synchronizing else 1)
        if self.synchronizing:
            bucket.ready.add(parameter)
            if len(bucket.ready) == len(bucket.parameters):
                bucket.send()


class _Bucket:
    """Parameters whose gradients travel together, in one buffer of which they are views."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.parameters = group, list[nn.Parameter]()
        self.buffer = torch.empty(0)
        self.places: dict[nn.Parameter, Tensor] = {}  # the part of the buffer that holds its gradient
        self.ready: set[nn.Parameter] = set()  # whose gradient is complete, and divided
        self.work: dist.Work | None = None

    def fits(self, parameter: nn.Parameter, limit: int) -> bool:
        """Whether one more would still be within the limit."""
        size = sum(p.numel() * p.element_size() for p in [*self.parameters, parameter])
        return parameter.dtype == self.parameters[0].dtype and size <= limit

    def hold(self, parameter: nn.Parameter, divisor: int) -> None:
        """Move its new gradient to its place, and divide it on the way; one that lies there was accumulated there."""
        if not self.places:
            sizes = [p.numel() for p in self.parameters]
            self.buffer = self.parameters[0].new_zeros(sum(sizes))
            pieces = self.buffer.split(sizes)
            self.places = {p: piece.view_as(p) for p, piece in zip(self.parameters, pieces, strict=True)}
        place = self.places[parameter]
        if parameter.grad is place:
            place.div_(divisor)
        elif parameter.grad is not None:
            torch.div(parameter.grad, divisor, out=place)  # one pass over memory, not two
            parameter.grad = place

    def send(self) -> None:
        """Start the mean of what has a gradient: all are divided before SUM, which overflows for large fp16 ones."""
        if all(p.grad is None for p in self.parameters):
            return
        for parameter in self.parameters:
            if parameter.grad is not None and parameter not in self.ready:  # accumulated before, and not this time
                self.hold(parameter, dist.get_world_size(self.group))
        for parameter in self.parameters:
            if parameter.grad is None:
                self.places[parameter].zero_()
        self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)

    def receive(self) -> None:
        """Wait for it."""
        if self.work is not None:
            self.work.wait()
        self.ready, self.work = set(), None
