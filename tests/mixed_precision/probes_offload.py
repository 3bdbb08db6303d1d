"""Probes of offloading: layers on a simulated or real GPU, and a log of copies."""

import contextlib
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab.measure.device import current
from lab.measure.memory import LiveStorages

OTHER_SIZE = 64  # numbers per row that are saved between layers; no layer saves tensors of this size
DEVICE = "cuda"  # the simulated GPU, or a real one


class Layer(nn.Module):
    """Saves two activations of a size unique to this layer, small ones, one parameter itself, and others as views."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.into, self.out = nn.Linear(width, size), nn.Linear(size, width)
        self.gain, self.fused = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(torch.tanh(self.into(x)))
        scale = hidden.mean(dim=1, keepdim=True).exp()  # small, and saved
        return self.out(hidden) * self.gain * self.fused.chunk(2)[1] * scale  # a view with an offset into its parameter


class Watch(TorchDispatchMode):
    """Records copies between host and device: direction, number of elements, and whose memory."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.log: list[list] = []
        self.owners = {
            p.untyped_storage()._cdata: (f"layer {i}'s {name}", p)
            for i, layer in enumerate(layers)
            for name, p in layer.named_parameters()
        }

    def note(self, what: str, source: Tensor) -> None:
        label, owner = self.owners.get(source.untyped_storage()._cdata, ("", source))
        if label:
            identical = source.shape == owner.shape and source.stride() == owner.stride()
            label += f" {tuple(owner.shape)} " + ("itself" if identical else f"as {tuple(source.shape)}")
        self.log.append([what, source.numel(), label])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            to_device, from_device = on_device(args[0]), on_device(args[1])
            if to_device != from_device:
                self.note("fetch" if to_device else "send", args[1])
        return out


def on_device(tensor: Tensor) -> bool:
    from lab.measure.roofline import is_on_gpu

    return is_on_gpu(tensor) or tensor.device.type == "cuda"


def alive(memory: LiveStorages, device: bool = True, skip: Container[int] = ()) -> list[int]:
    """Bytes of each storage alive on the simulated device, or on the host. skip: keys of storages to leave out."""
    storages = [ref() for key, ref in [*memory.known.items()] if key not in skip]
    return [s.nbytes() for s in storages if s is not None and hasattr(s, "on_simulated_gpu") == device]


def _record_copies(watch: Watch) -> Any:
    """On the simulated device `.to()`, `.cpu()` and `.cuda()` are not operators; patch them to record copies."""
    from lab.measure import placement

    for name, word in (("upload", "fetch"), ("download", "send")):
        real = getattr(placement, name)

        def noted(gpu: Any, x: Tensor, *args: Any, real: Any = real, word: str = word, **kwargs: Any) -> Tensor:
            result = real(gpu, x, *args, **kwargs)
            if result is not x:
                watch.note(word, x)
            return result

        setattr(placement, name, noted)


def _loaded(states: list[dict], sizes: list[int], x: Tensor, device: str) -> tuple[nn.ModuleList, Tensor]:
    layers = nn.ModuleList(Layer(x.shape[1], size) for size in sizes)
    for layer, state in zip(layers, states, strict=True):
        layer.load_state_dict(state)
    return layers.to(device), x.to(device).requires_grad_()


def _offload(impl: Any, mode: str, layers: nn.ModuleList, minimum: int) -> contextlib.AbstractContextManager:
    return (
        contextlib.nullcontext() if mode == "plain" else impl.mixed_precision.offload.Offload(layers, minimum=minimum)
    )


def offloaded(impl: Any, states: list[dict], sizes: list[int], x: Tensor, minimum: int, mode: str) -> dict:
    """Forward and backward; returns gradients, the log of copies, and bytes of saved tensors still on the device."""
    layers, x = _loaded(states, sizes, x, DEVICE)
    watch, others = Watch(layers), list[Tensor]()
    _record_copies(watch)

    def forward() -> Tensor:
        y = x
        for i, layer in enumerate(layers):
            if i == 1:  # a saved tensor between layers, as large as theirs
                others.append(torch.tanh(y.repeat(1, OTHER_SIZE // y.shape[1] + 1)[:, :OTHER_SIZE]))
                y = y + others[0].mean(dim=1, keepdim=True)
            y = layer(y)
            y.register_hook(lambda gradient, i=i: watch.log.append(["backward", i, ""]))
        return y

    with watch:
        with LiveStorages() as memory:
            with _offload(impl, mode, layers, minimum):
                y = forward()
            torch.cuda.synchronize()
            left = sum(alive(memory, skip={t.untyped_storage()._cdata for t in (x, y, *others, *layers.parameters())}))
        split = len(watch.log)
        y.sum().backward()
        torch.cuda.synchronize()
    return {
        "grads": [p.grad.cpu() for p in layers.parameters()] + [x.grad.cpu()],
        "y": y.detach().cpu(), "log": watch.log[:split], "backward": watch.log[split : split + 1000],
        "alive": left,
    }  # fmt: skip


# ---- in virtual time ----


class Work(torch.autograd.Function):
    """Returns 2 x. Forward and backward work `seconds` each; forward saves `count` numbers, backward calls `report`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, seconds: float, report: Any) -> Tensor:
        current().launch(seconds)
        ctx.save_for_backward(torch.full((count,), 2.0, device=DEVICE))
        ctx.seconds, ctx.report = seconds, report
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        ctx.report(on_device(saved))
        current().launch(ctx.seconds)
        return gradient * saved[0], None, None, None


class Timed(nn.Module):
    """Two pieces of work; the report comes from the one that backward reaches last."""

    def __init__(self, count: int, seconds: float, report: Any):
        super().__init__()
        self.count, self.seconds, self.report = count, seconds, report

    def forward(self, x: Tensor) -> Tensor:
        x = Work.apply(x, self.count, self.seconds / 2, self.report)
        return Work.apply(x, self.count, self.seconds / 2, lambda present: None)


def timed(impl: Any, counts: list[int], seconds: list[float]) -> dict:
    """Layer i saves counts[i] float32 numbers twice, and works seconds[i] per direction, on the simulated device.

    Backward runs twice over one graph. "rows", taken in the second half of each layer's backward: [layer, bytes of each
    tensor on the device, whether its saved tensors are there]. "after": bytes on the device after forward and after
    each backward. "left": bytes on device and host at the end.
    """
    gpu, memory, rows = current(), LiveStorages(), []
    layers = nn.ModuleList(
        Timed(n, s, lambda present, i=i: rows.append([i, alive(memory), present]))
        for i, (n, s) in enumerate(zip(counts, seconds, strict=True))
    )
    x = torch.ones(16, device=DEVICE, requires_grad=True)
    offload = impl.mixed_precision.offload.Offload(layers)
    with memory:
        start, y = gpu.now, x
        with offload:
            for layer in layers:
                y = layer(y)
        torch.cuda.synchronize()
        forward_s, after = gpu.now - start, [sum(alive(memory))]
        loss, backward_s = y.sum(), []
        for retain in (True, False):
            start = gpu.now
            loss.backward(retain_graph=retain)
            torch.cuda.synchronize()
            backward_s.append(gpu.now - start)
            after.append(sum(alive(memory)))
        del y, loss
    return {
        "forward_s": forward_s, "backward_s": backward_s, "after": after, "rows": rows,
        "left": sum(alive(memory)) + sum(alive(memory, device=False)),
    }  # fmt: skip


def called(impl: Any, states: list[dict], sizes: list[int], x: Tensor, mode: str, device: str, kind: str) -> dict:
    """Result and gradients of layers with dropout; kind: "plain call", "twice" through one graph, or "no grad"."""
    layers, x = _loaded(states, sizes, x, device)
    torch.manual_seed(3)
    with torch.set_grad_enabled(kind != "no grad"), _offload(impl, mode, layers, 64):
        y = x
        for layer in layers:
            y = nn.functional.dropout(layer(y), 0.3)
    if kind != "no grad":
        for retain in (True, False) if kind == "twice" else (False,):
            y.sin().sum().backward(retain_graph=retain)
    grads = [t.grad.cpu() for t in (x, *layers.parameters()) if t.grad is not None]
    return {"y": y.detach().cpu(), "grads": grads, "after": torch.rand(3)}
