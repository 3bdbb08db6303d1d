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
    """Everything done within belongs to the range `name`: `with annotate("forward"):`, or `@annotate("forward")`.

    Opens an NVTX range, with the nvtx package where it is installed, else with torch.cuda.nvtx where there is CUDA,
    else none; and beside it a torch.profiler.record_function, always. Ranges nest, have any text for a name, braces
    too, and are closed when the block is left, by an exception too, which goes on.
    Source: NVIDIA Tools Extension Library (NVTX) documentation, "push/pop ranges".
    """
    with record_function(name), _nvtx_range(name):
        yield


def annotated_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """`lab.model.transformer.attention` with its parts in ranges: "scores", "softmax" and "values" in "attention".

    q (…, queries, dim), k and v (…, keys, dim). "scores" holds q kᵀ, its scale and the mask (query i sees keys 0 … i),
    "softmax" the softmax over keys, "values" its product with v. Returns (…, queries, dim).
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
