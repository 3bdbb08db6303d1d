"""A simulated asynchronous GPU: shows a missing `torch.cuda.synchronize()` on any laptop.

The host has one virtual clock. A launch queues work on a stream and returns at once. The work starts when the
stream is free, and ends in virtual time. A wait moves the host's clock to this end. Values are computed at
once, on the CPU.

    with SimulatedGPU() as gpu:
        start = time.perf_counter()
        gpu.launch(0.010)  # or torch operators on "cuda" tensors, charged by lab.measure.roofline
        torch.cuda.synchronize()
        time.perf_counter() - start  # 0.010 s, on any machine

lab.measure.patches lists the clocks and functions of torch.cuda and torch.accelerator that it covers, and
lab.measure.placement the functions of "cuda" tensors. Not covered: datetime, other processes and threads, CUDA graphs,
torch.compile, Triton kernels. Python itself and CPU tensors take no virtual time; streams share the device
without slowing each other down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from . import streams
from .patches import patched
from .placement import PlacementMode
from .roofline import A100, Device, RooflineMode
from .streams import Stream, current

__all__ = ["SimulatedGPU", "current"]


class SimulatedGPU:
    """One GPU and the host's clock. Attributes ending in _s are virtual seconds.

    device: peak FLOP/s and bandwidths, from which the time of torch operators follows (default: A100 SXM).
    launch_s, call_s, clock_s: host time per launch, per other call into the driver, and per reading of a clock.
    """

    def __init__(
        self, device: Device = A100, *, launch_s: float = 5e-6, call_s: float = 0.5e-6, clock_s: float = 50e-9
    ):
        self.device, self.launch_s, self.call_s, self.clock_s = device, launch_s, call_s, clock_s
        self.now = 0.0  # virtual seconds since the device was made
        self.slept = 0.0  # virtual seconds that the host slept: clocks of CPU time do not count them
        self.streams: list[Stream] = []
        self.default_stream = self.stream = Stream(gpu=self)
        self.launches = 0  # pieces of work queued so far
        # The latest calls, by name: clocks, "synchronize", and the similar methods of streams and events.
        self.calls: deque[str] = deque(maxlen=1 << 12)
        self.on_wait: Callable[[], None] = lambda: None  # called when the host waits, or when a poll finds work done
        self.ranges: list[tuple[str, str, float]] = []  # NVTX: (push, pop or mark; message; now)
        self._undo: ExitStack | None = None

    def launch(self, seconds: float, stream: Stream | None = None) -> None:
        """Queue work of a known duration on a stream (default: the current one) and return at once."""
        if not seconds >= 0:
            raise ValueError(f"work takes at least 0 seconds, got {seconds}")
        stream = stream or self.stream
        stream.tail = max(self.now, stream.tail) + seconds
        self.launches += 1
        self.now += self.launch_s

    def transfer(self, bytes: int, wait: bool) -> None:
        """Queue a copy over the link between host and GPU. wait: whether to wait for its end."""
        self.launch(bytes / self.device.host_bytes_per_s)
        if wait:
            self.stream.synchronize()

    def synchronize(self) -> None:
        """Make the host wait until every stream is empty."""
        self.calls.append("synchronize")
        self.wait_until(max(stream.tail for stream in self.streams))

    def wait_until(self, end: float) -> None:
        """Make the host wait for work that ends at virtual time `end`."""
        self.spend(self.call_s)
        self.on_wait()
        self.now = max(self.now, end)

    def spend(self, seconds: float) -> None:
        """Move the host's clock, because the host is busy for `seconds`."""
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        """Replaces time.sleep: moves the host's clock while the GPU continues its work."""
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.now += seconds
        self.slept += seconds

    def polled(self, end: float) -> bool:
        """Whether work that ends at `end` is done; does not wait."""
        self.spend(self.call_s)
        if done := end <= self.now:
            self.on_wait()
        return done

    def busy(self) -> bool:
        """Whether any stream still has work to do. Takes no virtual time, because probes call it."""
        return any(stream.tail > self.now for stream in self.streams)

    def install(self) -> SimulatedGPU:
        """Simulate the device in this process. Call this before importing the code to be timed.

        Otherwise code that binds a clock on import (`from time import perf_counter`) keeps the real clock.
        """
        if streams.installed is not None:
            raise RuntimeError("a simulated GPU is installed already: uninstall it first")
        with ExitStack() as undo:
            placement = PlacementMode(self)
            undo.enter_context(patched(self, placement))
            undo.enter_context(RooflineMode(self))
            undo.enter_context(placement)
            self._undo = undo.pop_all()
        streams.installed = self
        return self

    def uninstall(self) -> None:
        """Restore the real clocks and devices of the process. Does nothing if this device is not installed."""
        if self._undo is not None:
            streams.installed, undo, self._undo = None, self._undo, None
            undo.close()

    def __enter__(self) -> SimulatedGPU:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.uninstall()
