"""Probe of speed on a GPU: our attention and PyTorch's, on fresh inputs; results are checked."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lab.harness.compare import interleaved


def raced(
    impl: Any,
    direction: str,
    is_causal: bool,
    pairs: int,
    seed: int,
    shape: tuple[int, ...] = (4, 16, 4096, 128),
    device: str = "cuda",
    passes: int = 8,
) -> tuple:
    """Seconds of PyTorch's FlashAttention-2 and of ours, in pairs of `passes` passes, each pass on its own inputs.

    `passes` is so large that launch time is hidden. Also the seconds in which ours waited for a core, and the largest
    ratio of our error to PyTorch's, both against attention in float32: after each repeat, one drawn pass is checked,
    its o or its gradients.
    """
    flash = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    dtype = torch.bfloat16 if flash else torch.float16
    generator = torch.Generator(device).manual_seed(seed)
    inputs: list[tuple[Tensor, ...]] = []
    graphs: dict[Any, list[Tensor]] = {}
    outputs: list[Any] = []
    error_ratios = [0.0]

    def student(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return impl.flash_attention.speed.flash_attention(q, k, v, is_causal)

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def draw_inputs() -> None:
        inputs[:] = [
            tuple(torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))
            for _ in range(passes)
        ]
        for tensors in inputs:
            for t in tensors[:3]:
                t.requires_grad_()
        if direction == "backward":
            graphs.update({call: [call(*x) for *x, _ in inputs] for call in (student, peer)})

    def runner(call: Any) -> Any:
        def run_passes() -> None:
            outputs.clear()
            if direction == "backward":
                for o, (*x, do) in zip(graphs.pop(call), inputs, strict=True):
                    outputs.append(torch.autograd.grad(o, x, do))
            else:
                with torch.no_grad():
                    outputs.extend((call(*x),) for *x, _ in inputs)

        return run_passes

    def check(side: int) -> None:
        if side == 1:
            index = int(torch.randint(passes, (), generator=generator, device=device))
            *x, do = inputs[index]
            want = results(plain, [t.detach()[:1, :2].float().requires_grad_() for t in x], do[:1, :2].float())
            errors = [
                [float((checked_heads(t) - w).norm()) for t, w in zip(got, want, strict=True)]
                for got in (outputs[index], results(peer, x, do))
            ]
            error_ratios.extend(error / peer_error for error, peer_error in zip(*errors, strict=True))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(shape[2], shape[2], dtype=torch.bool, device=device).triu(1) & is_causal
        return (q @ k.mT * shape[3] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    def results(call: Any, x: list[Tensor], do: Tensor) -> tuple[Tensor, ...]:
        o = call(*x)
        return torch.autograd.grad(o, x, do) if direction == "backward" else (o.detach(),)

    draw_inputs()
    times = interleaved(runner(peer), runner(student), pairs, seed, draw_inputs, check)
    return (*times, float(torch.tensor(error_ratios).max()))


def checked_heads(t: Tensor) -> Tensor:
    """The heads that are checked: the first two of the first batch entry, in float32."""
    return t.detach()[:1, :2].float()
