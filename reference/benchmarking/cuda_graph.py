"""A step without launches: captured once in a CUDA graph, then replayed by a single call."""

from collections.abc import Callable

import torch
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
        if not all(t.is_cuda for t in inputs):
            raise ValueError(f"expected CUDA tensors, got devices {[str(t.device) for t in inputs]}")
        self.inputs = [t.clone() for t in inputs]  # the graph reads these addresses, forever
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = step(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result of step for these inputs, as a new tensor that later calls do not change.

        Raises ValueError if number, shape or dtype differ from the recorded inputs.
        """
        recorded, got = ([(tuple(t.shape), t.dtype) for t in ts] for ts in (self.inputs, inputs))
        if recorded != got:
            raise ValueError(f"expected inputs of {recorded}, as recorded, got {got}")
        for static, fresh in zip(self.inputs, inputs, strict=True):
            static.copy_(fresh)
        self.graph.replay()
        return self.output.clone()
