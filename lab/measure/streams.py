"""Streams and events of the simulated GPU, and the installed GPU. `lab.measure.device` implements the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import SimulatedGPU

CUDA = torch.device("cuda", 0)
installed: SimulatedGPU | None = None


def current() -> SimulatedGPU:
    """Return the installed simulated GPU. Raises RuntimeError without one."""
    if installed is None:
        raise RuntimeError('no simulated GPU is installed: run the probe with device="simulated"')
    return installed


class Stream:
    """Replaces torch.cuda.Stream: work on one stream runs in order; different streams run at the same time."""

    def __init__(self, device: Any = None, priority: int = 0, *, gpu: SimulatedGPU | None = None, **_: Any):
        self.gpu = gpu or current()
        self.tail = 0.0  # time at which the last piece of work in this queue ends
        self.stream_id = self.cuda_stream = len(self.gpu.streams)
        self.device, self.priority = CUDA, priority
        self._outer: list[Stream] = []
        self.gpu.streams.append(self)

    def synchronize(self) -> None:
        self.gpu.calls.append("Stream.synchronize")
        self.gpu.wait_until(self.tail)

    def query(self) -> bool:
        return self.gpu.polled(self.tail)

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Event) -> None:
        self.gpu.spend(self.gpu.call_s)
        if event.time is not None:
            self.tail = max(self.tail, event.time)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(gpu=self.gpu)
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer.append(self.gpu.stream)
        self.gpu.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.stream = self._outer.pop()


class Event:
    """Replaces torch.cuda.Event: a point in a stream, reached when all work queued before it is done."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, *, gpu: SimulatedGPU | None = None, **_: Any
    ):
        self.gpu = gpu or current()
        self.enable_timing = enable_timing
        self.time: float | None = None  # time at which the stream reaches the event; None: not recorded
        self.device = CUDA

    def record(self, stream: Stream | None = None) -> None:
        self.gpu.calls.append("Event.record")
        self.time = max(self.gpu.now, (stream or self.gpu.stream).tail)
        self.gpu.spend(self.gpu.call_s)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def query(self) -> bool:
        return self.gpu.polled(self.time or 0.0)

    def synchronize(self) -> None:
        self.gpu.calls.append("Event.synchronize")
        self.gpu.wait_until(self.time or 0.0)

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds from this event to `end_event`. Raises RuntimeError, as CUDA does, if one is not done."""
        self.gpu.calls.append("Event.elapsed_time")
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.time is None or end_event.time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if max(self.time, end_event.time) > self.gpu.now:
            raise RuntimeError("CUDA error: device not ready (synchronize before reading the elapsed time)")
        return (end_event.time - self.time) * 1e3
