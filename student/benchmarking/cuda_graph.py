"""A step without launches: recorded once into a CUDA graph, then replayed by a single call."""

from collections.abc import Callable

from torch import Tensor


class GraphedStep:
    """A function of tensors as one CUDA graph: the host launches once, whatever the number of kernels.

    Source: PyTorch documentation, "CUDA semantics: CUDA Graphs".
    """

    def __init__(self, step: Callable[..., Tensor], *inputs: Tensor, warmup: int = 3):
        """Record step(*inputs) → Tensor.

        inputs: CUDA tensors; later calls take tensors of the same shapes and dtypes. step runs `warmup` times on a side
        stream first, as libraries allocate when they first run, then once while it is recorded; it may not wait for the
        device. Raises ValueError for an input that is not on a CUDA device.
        """
        raise NotImplementedError("benchmarking.cuda_graph: Record step(*inputs) → Tensor")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What step would return for these inputs: a new tensor, which later calls leave alone.

        Raises ValueError where number, shape or dtype differ from those recorded.
        """
        raise NotImplementedError("benchmarking.cuda_graph: What step would return for these inputs")
