"""Data parallelism as libraries do it: gradients travel in buckets, each as soon as it is full."""

import contextlib
from collections.abc import Iterator

import torch
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
        """Return the module's output. In training mode, first broadcast the buffers of rank 0."""
        if self.module.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.detach(), group_src=0, group=self.group)
        return super().forward(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Send the remaining buckets and wait for all of them; then each gradient is its mean over the group.

        If some parameters of a bucket received no gradient (on all ranks), the bucket never filled up, and is sent
        here, with or without zeros in their places. Their .grad stays as it was: None, or the zeros of zero_grad().
        A bucket in which every .grad is None is not sent. Gradients accumulated under no_sync() are sent, even those of
        parameters that the last backward did not reach.
        """
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.send()
        for bucket in self.buckets:
            bucket.receive()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only accumulate inside this context; the first backward after it sends the sums.

        Contexts nest: backward accumulates until the outermost one ends. An exception ends a context, too.

        Outside of it, call backward once per synchronization. A second call raises RuntimeError, because it would add
        to gradients that are being sent.
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
        bucket.copy_in(parameter, dist.get_world_size(self.group) if self.synchronizing else 1)
        if self.synchronizing:
            bucket.ready.add(parameter)
            if len(bucket.ready) == len(bucket.parameters):
                bucket.send()


class _Bucket:
    """Parameters whose gradients travel together, as views of one buffer."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.parameters = group, list[nn.Parameter]()
        self.buffer = torch.empty(0)
        self.grad_views: dict[nn.Parameter, Tensor] = {}  # the part of the buffer for its gradient
        self.ready: set[nn.Parameter] = set()  # whose gradient is complete, and divided
        self.work: dist.Work | None = None

    def fits(self, parameter: nn.Parameter, limit: int) -> bool:
        """Return whether the bucket may take one more parameter."""
        size = sum(p.numel() * p.element_size() for p in [*self.parameters, parameter])
        return parameter.dtype == self.parameters[0].dtype and size <= limit

    def copy_in(self, parameter: nn.Parameter, divisor: int) -> None:
        """Copy a new gradient into the buffer and divide it in the same pass; if it is there already, only divide."""
        if not self.grad_views:
            sizes = [p.numel() for p in self.parameters]
            self.buffer = self.parameters[0].new_zeros(sum(sizes))
            pieces = self.buffer.split(sizes)
            self.grad_views = {p: piece.view_as(p) for p, piece in zip(self.parameters, pieces, strict=True)}
        view = self.grad_views[parameter]
        if parameter.grad is view:
            view.div_(divisor)
        elif parameter.grad is not None:
            torch.div(parameter.grad, divisor, out=view)  # one pass over memory, not two
            parameter.grad = view

    def send(self) -> None:
        """Start the mean of all gradients, which are divided before SUM: sums of large fp16 gradients overflow."""
        if all(p.grad is None for p in self.parameters):
            return
        for parameter in self.parameters:
            if parameter.grad is not None and parameter not in self.ready:  # accumulated before, and not this time
                self.copy_in(parameter, dist.get_world_size(self.group))
        for parameter in self.parameters:
            if parameter.grad is None:
                self.grad_views[parameter].zero_()
        self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)

    def receive(self) -> None:
        """Wait for the all-reduce."""
        if self.work is not None:
            self.work.wait()
        self.ready, self.work = set(), None
