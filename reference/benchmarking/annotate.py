"""Names on the timeline: NVTX ranges for Nsight Systems, record_function for torch's own profiler."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

try:
    import nvtx
except ImportError:
    nvtx = None


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Put everything inside into the range `name`: `with annotate("forward"):`, or `@annotate("forward")`.

    Open an NVTX range with the nvtx package if it is installed, else with torch.cuda.nvtx if there is CUDA, else none.
    Always open a torch.profiler.record_function, too. Ranges nest. A name may be any text, with braces, too. A range
    ends when the block ends; an exception also ends it, and passes through.
    Source: NVIDIA Tools Extension Library (NVTX) documentation, "push/pop ranges".
    """
    with record_function(name), _nvtx_range(name):
        yield


def annotated_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute `lab.model.transformer.attention` with ranges "scores", "softmax" and "values" inside of "attention".

    q: (…, queries, dim); k, v: (…, keys, dim). "scores" contains q kᵀ, its scale and the mask (query i sees keys 0 to
    i), "softmax" the softmax over keys, "values" the product with v. Returns (…, queries, dim).
    """
    with annotate("attention"):
        with annotate("scores"):
            scores = q @ k.mT / q.shape[-1] ** 0.5  # (…, queries, keys)
            if is_causal:
                after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(after, float("-inf"))
        with annotate("softmax"):
            p = torch.softmax(scores, dim=-1)
        with annotate("values"):
            return p @ v  # (…, queries, dim)


@contextlib.contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    if nvtx is not None:
        with nvtx.annotate(name):
            yield
    elif torch.cuda.is_available():  # torch.cuda.nvtx.range(name) would take braces in the name for a format
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
    else:
        yield
