"""Names on the timeline: NVTX ranges for Nsight Systems, record_function for torch's own profiler."""

import contextlib
from collections.abc import Iterator

from torch import Tensor


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Put everything inside into the range `name`: `with annotate("forward"):`, or `@annotate("forward")`.

    Open an NVTX range with the nvtx package if it is installed, else with torch.cuda.nvtx if there is CUDA, else none.
    Always open a torch.profiler.record_function, too. Ranges nest. A name may be any text, with braces, too. A range
    ends when the block ends; an exception also ends it, and passes through.
    Source: NVIDIA Tools Extension Library (NVTX) documentation, "push/pop ranges".
    """
    raise NotImplementedError("benchmarking.annotate: Put everything inside into the range `name`")


def annotated_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute `lab.model.transformer.attention` with ranges "scores", "softmax" and "values" inside of "attention".

    q: (…, queries, dim); k, v: (…, keys, dim). "scores" contains q kᵀ, its scale and the mask (query i sees keys 0 to
    i), "softmax" the softmax over keys, "values" the product with v. Returns (…, queries, dim).
    """
    raise NotImplementedError(
        'benchmarking.annotate: Compute `lab.model.transformer.attention` with ranges "scores", "softmax" and …'
    )
