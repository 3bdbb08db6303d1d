"""A step without launches: captured once in a CUDA graph, then replayed by a single call."""

from collections.abc import Callable

from torch import Tensor


class GraphedStep:
    """A function of tensors as one CUDA graph: the host launches once, however many kernels there are.

    Source: PyTorch documentation, "CUDA semantics: CUDA Graphs".
    """

    def __init__(self, step: Callable[..., Tensor], *inputs: Tensor, warmup: int = 3):
        """Record step(*inputs) → Tensor.

        inputs: CUDA tensors; later calls take tensors of the same shapes and dtypes. Run step `warmup` times on a side
        stream first, because libraries allocate when they first run, then once more to capture it. step must not wait
        for the device. Raises ValueError for an input that is not on a CUDA device.
        """
        raise NotImplementedError("benchmarking.cuda_graph: Record step(*inputs) → Tensor")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result of step for these inputs, as a new tensor that later calls do not change.

        Raises ValueError if number, shape or dtype differ from the recorded inputs.
        """
        raise NotImplementedError(
            "benchmarking.cuda_graph: Return the result of step for these inputs, as a new tensor that later calls do …"
        )
