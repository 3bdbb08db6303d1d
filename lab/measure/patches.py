"""The clocks and CUDA functions that a simulated GPU replaces: one table per module.

Modules imported earlier keep the real clocks if they bound them by name, as `lab.measure.clock` does.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from ..solution.forbidden import ForbiddenCall
from .streams import CUDA, Event, Stream

if TYPE_CHECKING:
    from .device import SimulatedGPU
    from .placement import PlacementMode

_REAL_TIMER = timeit.default_timer


@contextmanager
def patched(gpu: SimulatedGPU, placement: PlacementMode) -> Iterator[None]:
    """Replace clocks and torch.cuda by those of `gpu` inside the block, and restore them afterwards.

    Raises ForbiddenCall if the code in the block has replaced one of them: its measurements would be worthless.
    """
    had_cuda = torch.cuda.is_available()
    names = [(owner, name, value) for owner, table in _tables(gpu, placement) for name, value in table.items()]
    try:
        with ExitStack() as undo:
            for owner, name, value in names:
                undo.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))
            patches = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
            yield
            if replaced := [name for owner, name, value in patches if getattr(owner, name, None) is not value]:
                raise ForbiddenCall(f"a solution does not replace what measures it: {', '.join(replaced)}")
    finally:
        if had_cuda:
            torch.cuda.init()  # the simulation may have made torch believe that it is initialised


def _tables(gpu: SimulatedGPU, placement: PlacementMode) -> list[tuple[Any, dict[str, Any]]]:
    clocks, common = _clocks(gpu), _common(gpu)
    streams = {"Stream": Stream, "Event": Event}
    return [
        (time, clocks),
        *((owner, {name: _replace_clock(clocks["perf_counter"], getattr(owner, name))}) for owner, name in _BOUND),
        (torch.cuda, common | _cuda(gpu) | streams),
        (torch.cuda.streams, streams),
        (torch.cuda.nvtx, _nvtx(gpu)),
        (torch.cuda.profiler, {"start": lambda: None, "stop": lambda: None}),
        (torch.accelerator, common | _accelerator(gpu)),
        (torch, {"Stream": Stream, "Event": _DeviceEvent, "Generator": _Generator}),
        (torch.Tensor, {"record_stream": lambda x, stream: None, "pin_memory": lambda x, device=None: x.clone()}),
        (torch.autocast, {"__init__": _autocast_on_cpu(torch.autocast.__init__)}),
        (torch.autograd, {"_engine_run_backward": _with_placement(placement, torch.autograd._engine_run_backward)}),
        (saved_tensors_hooks, {"__init__": _packing_with_placement(placement, saved_tensors_hooks.__init__)}),
    ]


# timeit has bound the clock on import: as a name, and in the defaults of its functions.
_BOUND = (
    (timeit, "default_timer"),
    (timeit.Timer.__init__, "__defaults__"),
    (timeit.timeit, "__defaults__"),
    (timeit.repeat, "__defaults__"),
)


def _replace_clock(clock: Callable, bound: Any) -> Any:
    """Return `bound`, a clock or a tuple of defaults, with `clock` in place of the real clock."""
    return tuple(clock if d is _REAL_TIMER else d for d in bound) if isinstance(bound, tuple) else clock


def _clocks(gpu: SimulatedGPU) -> dict[str, Callable]:
    """Return virtual versions of all clocks in `time`. They continue from the current values of the real clocks.

    Clocks of CPU time do not count sleep.
    """
    origins = {name: getattr(time, name)() - gpu.now for name in ("time", "monotonic", "perf_counter")}
    origins |= {name: getattr(time, name)() - gpu.now + gpu.slept for name in ("process_time", "thread_time")}

    def seconds(name: str) -> float:
        gpu.spend(gpu.clock_s)
        gpu.calls.append(name)
        return origins[name] + gpu.now - (gpu.slept if name in ("process_time", "thread_time") else 0.0)

    def nanoseconds(name: str) -> int:
        return round(seconds(name) * 1e9)

    by_id = {getattr(time, id): name for id, name in _CLOCK_IDS.items() if hasattr(time, id)}
    return {
        **{name: partial(seconds, name) for name in origins},
        **{f"{name}_ns": partial(nanoseconds, name) for name in origins},
        "clock_gettime": lambda clk_id: seconds(by_id[clk_id]),
        "clock_gettime_ns": lambda clk_id: nanoseconds(by_id[clk_id]),
        "sleep": gpu.sleep,
    }


_CLOCK_IDS = {
    "CLOCK_REALTIME": "time",
    "CLOCK_TAI": "time",
    "CLOCK_MONOTONIC": "monotonic",
    "CLOCK_MONOTONIC_RAW": "monotonic",
    "CLOCK_BOOTTIME": "monotonic",
    "CLOCK_PROCESS_CPUTIME_ID": "process_time",
    "CLOCK_THREAD_CPUTIME_ID": "thread_time",
}


def _common(gpu: SimulatedGPU) -> dict[str, Any]:
    """Return the functions that torch.cuda and torch.accelerator have in common."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda device=None: gpu.synchronize(),
        "current_stream": lambda device=None: gpu.stream,
        "set_stream": lambda stream: setattr(gpu, "stream", stream),
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        **{name: lambda device=None: 0 for name in _MEMORY},
        **{name: lambda device=None: None for name in _RESETS},
    }


_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats")


def _cuda(gpu: SimulatedGPU) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=gpu.device.name,
        major=gpu.device.capability[0],
        minor=gpu.device.capability[1],
        total_memory=gpu.device.memory_bytes,
        multi_processor_count=gpu.device.multiprocessors,
        warp_size=32,
        is_integrated=False,
    )
    return {
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),  # there is one device
        "device_of": lambda tensor: nullcontext(),
        "default_stream": lambda device=None: gpu.default_stream,
        "stream": lambda stream: stream or gpu.stream,  # a Stream is a context manager
        "StreamContext": lambda stream: stream or gpu.stream,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: gpu.launch(cycles / 1.41e9),  # boost clock of an A100
        "get_device_name": lambda device=None: gpu.device.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.device.capability,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "mem_get_info": lambda device=None: (gpu.device.memory_bytes, gpu.device.memory_bytes),
        # "cuda" uses the CPU's random state
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "seed": lambda: torch.default_generator.seed(),
        "seed_all": lambda: torch.default_generator.seed(),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "set_rng_state_all": lambda states: torch.default_generator.set_state(states[0]),
    }


def _nvtx(gpu: SimulatedGPU) -> dict[str, Callable]:
    """Return functions that write ranges to gpu.ranges. As in NVTX, push and pop return the depth, from 0."""
    depth = 0

    def push(msg: str) -> int:
        nonlocal depth
        gpu.ranges.append(("push", msg, gpu.now))
        depth += 1
        return depth - 1

    def pop() -> int:
        nonlocal depth
        gpu.ranges.append(("pop", "", gpu.now))
        depth -= 1
        return depth

    def start(msg: str) -> int:
        gpu.ranges.append(("start", msg, gpu.now))
        return len(gpu.ranges) - 1

    return {
        "range_push": push,
        "range_pop": pop,
        "mark": lambda msg: gpu.ranges.append(("mark", msg, gpu.now)),
        "range_start": start,
        "range_end": lambda range_id: gpu.ranges.append(("end", gpu.ranges[range_id][1], gpu.now)),
    }


def _accelerator(gpu: SimulatedGPU) -> dict[str, Any]:
    return {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": lambda device: None,
        "set_device_idx": lambda device: None,
        "device_index": lambda device: nullcontext(),
        "get_memory_info": lambda device=None: (gpu.device.memory_bytes, gpu.device.memory_bytes),
    }


class _DeviceEvent(Event):
    """Replaces torch.Event, whose first argument is the device."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, **_: Any):
        super().__init__(enable_timing, blocking)


class _Generator(torch.Generator):
    """Replaces torch.Generator: draws on the CPU, even for "cuda"."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]


def _autocast_on_cpu(init: Callable) -> Callable:
    """Make autocast("cuda") cast the operators that autocast("cpu") casts, by default to the dtype of CUDA."""

    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == CUDA.type:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    return __init__


def _with_placement(placement: PlacementMode, run: Callable) -> Callable:
    """Wrap `run` to redirect "cuda" also where torch calls Python functions with function modes switched off."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        if placement in _get_current_function_mode_stack():
            return run(*args, **kwargs)
        with placement:
            return run(*args, **kwargs)

    return redirected


def _packing_with_placement(placement: PlacementMode, init: Callable) -> Callable:
    def __init__(self: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
        init(self, _with_placement(placement, pack_hook), _with_placement(placement, unpack_hook))

    return __init__
