"""Records profiles on a GPU for figures of the chapters: `python -m benchmarks.recorded`.

Writes benchmarks/data/trace.json (training steps, host and device) and memory.json (memory over a step).
`--device cpu` rehearses the first.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from lab.course.assignment import ROOT
from lab.model.transformer import SIZES, Transformer

from .chapters import checkpoint_blocks
from .results import COMMIT, device, parse_args

DATA = ROOT / "benchmarks" / "data"
PHASES = ("forward", "backward", "optimizer")
STEPS = {"tiny": (4, 128), "small": (8, 1024)}  # size: batch and context
Phase = tuple[str, Callable[[], Any]]


def main() -> None:
    """Record, and write both files."""
    kind = parse_args(__doc__).device
    with torch.device(kind):
        steps = {size: traced(size, kind == "cuda") for size in (STEPS if kind == "cuda" else ["tiny"])}
        keep("trace", steps, kind)
        if kind == "cuda":
            keep("memory", {name: memory_trace(name == "checkpointed") for name in ("plain", "checkpointed")}, kind)


def keep(name: str, found: dict, kind: str) -> None:
    text = json.dumps({"device": device(), "commit": COMMIT, **found}, separators=(",", ":"))
    print(name, len(text), text[:600])
    if kind == "cuda":
        (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def phases(size: str, checkpointed: bool = False) -> list[Phase]:
    """Return a training step in bfloat16 with AdamW as three calls."""
    batch, context = STEPS[size]
    model = Transformer(SIZES[size]).to(torch.bfloat16)
    tokens, targets = torch.randint(SIZES[size].vocabulary, (2, batch, min(context, SIZES[size].context))).unbind()
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    if checkpointed:
        checkpoint_blocks(model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    calls = (lambda: losses.append(model.loss(tokens, targets)), lambda: losses.pop().backward(), update)
    return list(zip(PHASES, calls, strict=True))


def traced(size: str, gpu: bool) -> dict[str, list]:
    """Trace three steps, in µs: [name, start, end] per phase on the host, [start, end] of the device's work."""
    step = phases(size)

    def run() -> None:
        for name, call in step:
            with record_function(name):
                call()

    for _ in range(5):
        run()
    with torch.profiler.profile() as profile:
        for _ in range(4):
            run()
        if gpu:
            torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda e: e.time_range.start)
    host = [[e.name, e.time_range.start, e.time_range.end] for e in events
            if e.name in PHASES and e.device_type == DeviceType.CPU]  # fmt: skip
    kernels = [[e.time_range.start, e.time_range.end] for e in events
           if e.device_type == DeviceType.CUDA and not e.is_user_annotation]  # fmt: skip
    first = host[3][1]  # without the first step
    return {
        "host": [[name, *(round(t - first, 1) for t in times)] for name, *times in host[3:]],
        "device": [[round(t - first, 1) for t in times] for times in merged(kernels) if times[1] > first],
        "kernels": len(kernels) // 4,
    }  # fmt: skip


def merged(spans: list[list[float]], gap_us: float = 3.0) -> Iterator[list[float]]:
    """Join spans whose gaps are small."""
    current: list[float] = []
    for start, end in spans:
        if current and start - current[1] <= gap_us:
            current[1] = max(current[1], end)
            continue
        if current:
            yield current
        current = [start, end]
    if current:
        yield current


def memory_trace(checkpointed: bool) -> dict[str, list]:
    """MiB held after each allocation and free of a step, and the number of these events up to each phase's end."""
    step, phase_ends = phases("small", checkpointed), []
    for _ in range(3):
        for _, call in step:
            call()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    for name, call in step:
        call()
        torch.cuda.synchronize()
        phase_ends.append([name, len(changes())])
    found = changes()
    torch.cuda.memory._record_memory_history(enabled=None)
    totals = [start]
    for change in found:
        totals.append(totals[-1] + change)
    return {"phases": phase_ends, "MiB": [round(b / 2**20) for b in totals]}


def changes() -> list[int]:
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[e["action"]] * e["size"] for e in torch.cuda.memory._snapshot()["device_traces"][0]
            if e["action"] in signs]  # fmt: skip


if __name__ == "__main__":
    main()
