"""Activation offloading: copied to the host when layers finish, fetched one layer before backward needs them."""

import weakref
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn


class Offload:
    """Offload saved activations: `with Offload(layers): loss = model(x)`, then `loss.backward()`.

    Within the block, copy each tensor that one of `layers` saves for backward to host memory, and keep only the copy.
    Tensors of less than `minimum` bytes, views of the layers' parameters, and tensors saved outside of the layers stay
    on the device. When backward first needs a tensor of layer i, fetch all tensors of layer i that are not back yet;
    then start to fetch those of layer i − 1, so that they arrive while layer i computes. Free the device's copy after
    its use. The host's copy lives exactly as long as the graph, so a second backward can fetch it again. On CUDA,
    copies run on their own stream (only those of pinned memory run beside work).
    Source: PyTorch documentation, "Hooks for saved tensors"; Rhu et al. 2016, "vDNN", section 3.
    """

    def __init__(self, layers: Sequence[nn.Module], *, minimum: int = 1 << 20):
        """layers: in the order in which they run, each once. minimum: bytes of the smallest tensor to offload."""
        self.layers, self.minimum = list(layers), minimum
        self.parameters = {p.untyped_storage().data_ptr() for layer in self.layers for p in layer.parameters()}
        self.sent: list[list[weakref.ref[_Sent]]] = [[] for _ in self.layers]  # autograd alone keeps them alive
        self.running: int | None = None
        self.reached = -1  # the layer that backward has come to
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "Offload":
        self.handles = [
            handle
            for i, layer in enumerate(self.layers)
            for handle in (
                layer.register_forward_pre_hook(lambda *_, i=i: self._run(i)),
                layer.register_forward_hook(lambda *_: self._run(None)),
            )
        ]
        self.hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hooks.__exit__(kind, error, trace)
        for handle in self.handles:
            handle.remove()

    def _run(self, layer: int | None) -> None:
        self.running = layer

    def _pack(self, tensor: Tensor) -> "Tensor | _Sent":
        large = tensor.numel() * tensor.element_size() >= self.minimum
        if self.running is None or not large or tensor.untyped_storage().data_ptr() in self.parameters:
            return tensor
        sent = _Sent(tensor, self.running, self.stream if tensor.is_cuda else None)
        self.sent[self.running].append(weakref.ref(sent))
        return sent

    def _unpack(self, packed: "Tensor | _Sent") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.layer > self.reached:  # another backward begins
            for sent in self._alive(*range(len(self.layers))):
                sent.used = False
        self.reached = packed.layer
        for layer in (packed.layer, packed.layer - 1):
            for sent in self._alive(layer):
                if not sent.used:
                    sent.fetch()
        return packed.arrived()

    def _alive(self, *layers: int) -> list["_Sent"]:
        """All that these layers sent and a graph still keeps."""
        references = [reference for layer in layers if layer >= 0 for reference in self.sent[layer]]
        return [sent for reference in references if (sent := reference()) is not None]


class _Sent:
    """A tensor on the host, and on its way back."""

    def __init__(self, tensor: Tensor, layer: int, stream: torch.cuda.Stream | None):
        self.layer, self.device, self.stream = layer, tensor.device, stream
        self.back: Tensor | None = None
        self.used = False  # by the backward that runs
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is not None:
            # Before the block: inside it the current stream is this one, and would wait for itself.
            stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(stream)  # its memory must not be used again before the copy has read it
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        """Start the way back, if it has not been started."""
        if self.back is None:
            with torch.cuda.stream(self.stream):
                self.back = torch.empty_like(self.host, device=self.device)
                self.back.copy_(self.host, non_blocking=True)
            self.event = self.stream.record_event() if self.stream is not None else None

    def arrived(self) -> Tensor:
        """The tensor, once what is computed from now on may read it. From here on it is the caller's alone."""
        self.fetch()
        back, self.back, self.used = self.back, None, True
        assert back is not None
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
            back.record_stream(torch.cuda.current_stream(self.device))
        return back
