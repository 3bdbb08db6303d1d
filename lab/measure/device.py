"""A simulated asynchronous GPU: a laptop on which a missing `torch.cuda.synchronize()` shows, exactly.

The host has one virtual clock. A launch queues work on a stream and returns at once; the work starts when the
stream is free and ends in virtual time; waiting moves the host's clock to that end. Values are computed at
once, on the CPU.

    with SimulatedGPU() as gpu:
        start = time.perf_counter()
        gpu.launch(0.010)  # or torch operators on "cuda" tensors, charged by lab.measure.roofline
        torch.cuda.synchronize()
        time.perf_counter() - start  # 0.010 s, on any machine

What it covers is listed in lab.measure.patches (clocks, torch.cuda, torch.accelerator) and
lab.measure.placement ("cuda" tensors). Not covered: datetime, other processes and threads, CUDA graphs,
torch.compile, Triton kernels. Python itself and CPU tensors take no virtual time; streams share the device
without slowing each other down.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any

import torch

from .roofline import A100, Device, RooflineMode

CUDA = torch.device("cuda", 0)
_installed: SimulatedGPU | None = None


def current() -> SimulatedGPU:
    """The installed device. Raises RuntimeError when there is none."""
    if _installed is None:
        raise RuntimeError('no simulated GPU is installed: run the probe with device="simulated"')
    return _installed


class SimulatedGPU:
    """One GPU and the host's clock. Attributes ending in _s are virtual seconds.

    device: peak FLOP/s and bandwidths that torch operators are charged by (default: A100 SXM).
    launch_s, call_s, clock_s: what a launch, any other call into the driver, and reading a clock cost the
    host.
    compile_s: what the first call of an operator with new shapes and dtypes costs the host.
    """

    def __init__(
        self,
        device: Device = A100,
        *,
        launch_s: float = 5e-6,
        call_s: float = 0.5e-6,
        clock_s: float = 50e-9,
        compile_s: float = 0.0,
    ):
        self.device = device
        self.launch_s, self.call_s, self.clock_s, self.compile_s = launch_s, call_s, clock_s, compile_s
        self.now = 0.0  # seconds the host has lived through since the device was made
        self.slept = 0.0  # of these, seconds asleep: clocks of CPU time leave them out
        self.streams: list[Stream] = []
        self.default_stream = self.stream = Stream(gpu=self)
        self.launches = 0  # pieces of work queued so far
        self.calls: deque[str] = deque(
            maxlen=1 << 12
        )  # clocks that were read by name, "synchronize", and what of streams and events is like it; the last ones
        self.waits = 0  # times the host waited for the device, a stream, an event or a value
        self.ranges: list[tuple[str, str, float]] = []  # NVTX: (push, pop or mark; message; now)
        self.compiled: set[Any] = set()
        self._undo: ExitStack | None = None

    def launch(self, seconds: float, stream: Stream | None = None) -> None:
        """Queue work of a known duration on a stream (default: the current one) and return at once."""
        if not seconds >= 0:
            raise ValueError(f"work takes at least 0 seconds, got {seconds}")
        stream = stream or self.stream
        stream.tail = max(self.now, stream.tail) + seconds
        self.launches += 1
        self.now += self.launch_s

    def synchronize(self) -> None:
        """Let the host wait until every stream is empty."""
        self.calls.append("synchronize")
        self.wait_until(max(stream.tail for stream in self.streams))

    def wait_until(self, end: float) -> None:
        """Let the host wait for work that ends at `end`."""
        self.spend(self.call_s)
        self.waits += 1
        self.now = max(self.now, end)

    def spend(self, seconds: float) -> None:
        """Let the host be busy for some seconds."""
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        """time.sleep: the host's clock moves on, the device works on."""
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.now += seconds
        self.slept += seconds

    def busy(self) -> bool:
        """Whether any stream still has work to do. Costs nothing: for probes."""
        return any(stream.tail > self.now for stream in self.streams)

    def install(self) -> SimulatedGPU:
        """Put the device under this process: do it before importing the code that is to be timed.

        Code that binds a clock when it is imported (`from time import perf_counter`) binds a virtual one
        then.
        """
        global _installed
        if _installed is not None:
            raise RuntimeError("a simulated GPU is installed already: uninstall it first")
        from .patches import patched  # they import this module
        from .placement import PlacementMode

        with ExitStack() as undo:
            placement = PlacementMode(self)
            undo.enter_context(patched(self, placement))
            undo.enter_context(RooflineMode(self))
            undo.enter_context(placement)
            self._undo = undo.pop_all()
        _installed = self
        return self

    def uninstall(self) -> None:
        """Give the process its own clocks and devices back. Does nothing if this device is not installed."""
        global _installed
        if self._undo is not None:
            _installed, undo, self._undo = None, self._undo, None
            undo.close()

    def __enter__(self) -> SimulatedGPU:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.uninstall()


class Stream:
    """torch.cuda.Stream: work on one stream runs in order; streams run beside each other."""

    def __init__(self, device: Any = None, priority: int = 0, *, gpu: SimulatedGPU | None = None, **_: Any):
        self.gpu = gpu or current()
        self.tail = 0.0  # when the last piece of work queued here ends
        self.stream_id = self.cuda_stream = len(self.gpu.streams)
        self.device, self.priority = CUDA, priority
        self._outer: list[Stream] = []
        self.gpu.streams.append(self)

    def synchronize(self) -> None:
        self.gpu.calls.append("Stream.synchronize")
        self.gpu.wait_until(self.tail)

    def query(self) -> bool:
        self.gpu.spend(self.gpu.call_s)
        return self.tail <= self.gpu.now

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
    """torch.cuda.Event: a mark in a stream, reached when all work queued before it is done."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        *,
        gpu: SimulatedGPU | None = None,
        **_: Any,
    ):
        self.gpu = gpu or current()
        self.enable_timing = enable_timing
        self.time: float | None = None  # when the stream reaches it; None: not recorded
        self.device = CUDA

    def record(self, stream: Stream | None = None) -> None:
        self.gpu.calls.append("Event.record")
        self.time = max(self.gpu.now, (stream or self.gpu.stream).tail)
        self.gpu.spend(self.gpu.call_s)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def query(self) -> bool:
        self.gpu.spend(self.gpu.call_s)
        return self.time is None or self.time <= self.gpu.now

    def synchronize(self) -> None:
        self.gpu.calls.append("Event.synchronize")
        self.gpu.wait_until(self.time or 0.0)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to the other. Raises RuntimeError, as CUDA does, if one is not done."""
        self.gpu.calls.append("Event.elapsed_time")
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.time is None or end_event.time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if max(self.time, end_event.time) > self.gpu.now:
            raise RuntimeError("CUDA error: device not ready (synchronize before reading the elapsed time)")
        return (end_event.time - self.time) * 1e3
