"""Names on the timeline: NVTX ranges for Nsight Systems, record_function for torch's own profiler."""

import contextlib
from collections.abc import Iterator

from torch import Tensor


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Everything done within belongs to the range `name`: `with annotate("forward"):`, or `@annotate("forward")`.

    Opens an NVTX range, with the nvtx package where it is installed, else with torch.cuda.nvtx where there is CUDA,
    else none; and beside it a torch.profiler.record_function, always. Ranges nest, have any text for a name, braces
    too, and are closed when the block is left, by an exception too, which goes on.
    Source: NVIDIA Tools Extension Library (NVTX) documentation, "push/pop ranges".
    """
    raise NotImplementedError("benchmarking.annotate: Everything done within belongs to the range `name`")


def annotated_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """`lab.model.transformer.attention` with its parts in ranges: "scores", "softmax" and "values" in "attention".

    q (…, queries, dim), k and v (…, keys, dim). "scores" holds q kᵀ, its scale and the mask (query i sees keys 0 … i),
    "softmax" the softmax over keys, "values" its product with v. Returns (…, queries, dim).
    """
    raise NotImplementedError("benchmarking.annotate: `lab.model.transformer.attention` with its parts in ranges")
