"""Probes of the kernel table: made-up profiles with known times, and a profile of a real run."""

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from lab.harness.calls import plain
from lab.model.transformer import SIZES, Transformer


def table(impl: Any, tree: list, on_device: bool) -> dict:
    """The table of a made-up profile. Each node is [name, is range, own µs, [[kernel, µs]], [children]]."""
    events: list[FunctionEvent] = []
    _lay_out(tree, 0.0, events)
    if on_device:
        for node in [*events]:
            for kernel in node.kernels:  # as the profiler does: at its operator, and again as an event of its own
                events.append(_event(len(events), kernel.name, 5e6, 5e6 + kernel.duration, device=DeviceType.CUDA))
            if node.is_user_annotation:
                annotation = _event(len(events), node.name, 5e6, 6e6, device=DeviceType.CUDA)
                annotation.is_user_annotation = True
                events.append(annotation)
    listed = EventList(events, use_device="cuda" if on_device else None)
    listed._build_tree()
    return plain(impl.benchmarking.kernel_table.kernel_table(listed))


def _lay_out(tree: list, start: float, events: list[FunctionEvent]) -> float:
    """Place nodes one after another from `start` on; half of a node's own time follows its children. Return the end."""
    for name, is_range, self_us, kernels, children in tree:
        event = _event(len(events), name, start, start)
        event.is_user_annotation = is_range
        events.append(event)
        for kernel, microseconds in kernels:
            event.append_kernel(kernel, 0, microseconds)
        end = _lay_out(children, start + self_us / 2, events) + self_us / 2
        event.time_range.end = end
        start = end
    return start


def _event(id: int, name: str, start: float, end: float, device: Any = DeviceType.CPU) -> FunctionEvent:
    return FunctionEvent(id, name, 1, start, end, device_type=device, use_device="cuda")


def real_profile(impl: Any, ranges: list[str]) -> dict:
    """Profile a real run on the CPU: [name, parent's index or -1, own µs, is range] of each event, and the table."""
    model, tokens = Transformer(SIZES["tiny"]), torch.randint(256, (2, 32))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for name in ranges:
            with record_function(name):
                model.loss(tokens, tokens)
        model(tokens)
    events = [*profiled.events()]
    index = {id(e): i for i, e in enumerate(events)}
    rows = [
        [e.name, -1 if e.cpu_parent is None else index[id(e.cpu_parent)], float(e.self_cpu_time_total),
         bool(e.is_user_annotation)]
        for e in events
    ]  # fmt: skip
    return {"events": rows, **plain(impl.benchmarking.kernel_table.kernel_table(profiled.events()))}
