"""Activation checkpointing: keep the inputs of a function, and run it again in backward."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs), keeping only its tensor arguments for backward.

    Each backward runs `function` once more, with the random state and the autocast state of the first run, and
    differentiates that run. Afterwards the random state is as if `function` had not run again. Gradients reach every
    tensor among args and kwargs that requires one, and the parameters that `function` uses without taking them as
    arguments. Arguments may have any type; tensors inside containers do not count. `function` returns a tensor or a
    tuple; other values in a tuple pass through. Checkpoints may be nested. If autograd is off, just call `function`.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Autograd asks for a backward only where an input requires a gradient; parameters inside are none.
    anchor = torch.empty(0, requires_grad=True)
    return _Checkpoint.apply(anchor, function, tuple(kwargs), *args, *kwargs.values())


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
        ctx.function, ctx.names = function, names
        ctx.others = [None if isinstance(v, Tensor) else v for v in values]
        ctx.tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        ctx.save_for_backward(*(values[i] for i in ctx.tensors))
        devices = {"cpu", *(values[i].device.type for i in ctx.tensors)}
        ctx.autocast = [
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices if d in ("cpu", "cuda")
        ]
        ctx.gpus = sorted({values[i].device.index or 0 for i in ctx.tensors if values[i].is_cuda})
        ctx.random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in ctx.gpus]
        ctx.set_materialize_grads(False)
        return _call(function, names, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        values = list(ctx.others)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            values[i] = tensor.detach().requires_grad_(tensor.requires_grad)  # a new leaf: the graph ends here
        with torch.enable_grad(), _as_it_was(ctx):
            outputs = _call(ctx.function, ctx.names, values)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        reached = [
            (output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and isinstance(output, Tensor) and output.requires_grad
        ]  # fmt: skip
        if reached:
            torch.autograd.backward([o for o, _ in reached], [g for _, g in reached])
        return None, None, None, *(v.grad if isinstance(v, Tensor) else None for v in values)


def _call(function: Callable[..., Any], names: tuple[str, ...], values: Any) -> Any:
    """The last values are keyword arguments, in the order of names."""
    cut = len(values) - len(names)
    return function(*values[:cut], **dict(zip(names, values[cut:], strict=True)))


@contextlib.contextmanager
def _as_it_was(ctx: Any) -> Any:
    """Within, draw and cast as the first time; afterwards as if nothing had been drawn."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=ctx.gpus))
        on_cpu, on_gpus = ctx.random
        torch.set_rng_state(on_cpu)
        for gpu, state in zip(ctx.gpus, on_gpus, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        for device, dtype, enabled in ctx.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield
