"""What runs beside the implementation: layers on a GPU, simulated or real, and a log of what travels when."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda"  # where the tests put the simulated one, or there is a real one


class Layer(nn.Module):
    """Keeps two activations of a size that is its own, and one that is small."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.into, self.out = nn.Linear(width, size), nn.Linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(torch.tanh(self.into(x)))
        scale = hidden.mean(dim=1, keepdim=True).exp()  # small, and kept
        return self.out(hidden) * scale


class Watch(TorchDispatchMode):
    """Notes tensors that are alive on the device, and copies between host and device by size."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list] = []
        self.alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            to, source = on_device(args[0]), on_device(args[1])
            if to != source:
                self.log.append(["fetch" if to else "send", args[0].numel()])
        return out


def on_device(tensor: Tensor) -> bool:
    from lab.measure.roofline import holds

    return holds(tensor) or tensor.device.type == "cuda"


def _travel(watch: Watch) -> Any:
    """`.to()`, `.cpu()` and `.cuda()` of the simulated device are no operators: note them where they are done."""
    from lab.measure import placement

    for name, word in (("upload", "fetch"), ("download", "send")):
        real = getattr(placement, name)

        def noted(gpu: Any, x: Tensor, *args: Any, real: Any = real, word: str = word, **kwargs: Any) -> Tensor:
            result = real(gpu, x, *args, **kwargs)
            if result is not x:
                watch.log.append([word, x.numel()])
            return result

        setattr(placement, name, noted)


def offloaded(impl: Any, states: list[dict], sizes: list[int], x: Tensor, minimum: int, how: str) -> dict:
    """Forward and backward; gradients, what travelled when, and how much of what was saved stays on the device."""
    layers = nn.ModuleList(Layer(x.shape[1], size) for size in sizes)
    for layer, state in zip(layers, states, strict=True):
        layer.load_state_dict(state)
    layers, x = layers.to(DEVICE), x.to(DEVICE).requires_grad_()
    watch, made = Watch(), []
    _travel(watch)

    def forward() -> Tensor:
        y = x
        for i, layer in enumerate(layers):
            y = layer(y)
            y.register_hook(lambda gradient, i=i: watch.log.append(["backward", i]))
        return y

    class Made(TorchDispatchMode):
        """Every storage that operators make on the device in forward."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and on_device(out):
                made.append(weakref.ref(out.untyped_storage()))
            return out

    with watch:
        with Made():
            if how == "plain":
                y = forward()
            else:
                with impl.mixed_precision.offload.Offload(layers, minimum=minimum):
                    y = forward()
            torch.cuda.synchronize()
            known = {t.untyped_storage()._cdata for t in (x, y, *layers.parameters())}
            alive = {s._cdata: s.nbytes() for s in (r() for r in made) if s is not None and s._cdata not in known}
        sent = len(watch.log)
        y.sum().backward()
        torch.cuda.synchronize()
    return {
        "grads": [p.grad.cpu() for p in layers.parameters()] + [x.grad.cpu()],
        "y": y.detach().cpu(), "log": watch.log[:sent], "backward": watch.log[sent : sent + 1000],
        "alive": sum(alive.values()),
    }  # fmt: skip
