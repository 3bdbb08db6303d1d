"""Measures schedules of data parallelism over a real link: `python -m benchmarks.link`, on one GPU.

The link is the bus to the host. Each message goes to pinned memory and back, on two separate streams, so it takes
α + bytes / β as an all-reduce does. No gradients are added, and no collective's kernel competes with backward. Writes
benchmarks/results/link.json, and timelines to benchmarks/data/link.json. `--device cpu` rehearses it.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import record_function

from lab.model.transformer import SIZES, Transformer

from .attention import timed
from .recorded import keep, merged
from .results import parse_args, write
from .single import attend

MB = 10**6
BUCKETS = (1, 4, 16, 64, 256, 1024)  # MB
TOKENS = (2048, 4096, 8192, 16384)
ROUNDS = 9


class Link:
    """One stream to the host, one stream back, and a pinned buffer for all messages."""

    def __init__(self, bytes: int, gpu: bool):
        self.gpu = gpu
        self.host = torch.empty(bytes, dtype=torch.uint8, device="cpu", pin_memory=gpu)
        self.out, self.back = (torch.cuda.Stream() for _ in range(2)) if gpu else (None, None)

    def send(self, flat: Tensor, start: int) -> None:
        """Start to copy `flat` to the pinned buffer, from byte `start` on, and back."""
        slot = self.host[start : start + flat.nbytes].view(flat.dtype)
        if not self.gpu:
            flat.copy_(slot.copy_(flat))
            return
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            slot.copy_(flat, non_blocking=True)
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            flat.copy_(slot, non_blocking=True)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.current_stream().wait_stream(self.back)


class Buckets:
    """Gradients as views of flat tensors (buckets) of at least `bytes`, in the order of backward.

    when: "hook" sends each bucket as soon as it is ready; "after" sends all buckets after backward; "one by one" does
    the same and waits for each; "never" sends none.
    """

    def __init__(self, model: nn.Module, link: Link, bytes: int, when: str = "hook"):
        self.link, self.when = link, when
        self.groups: list[list[nn.Parameter]] = [[]]
        for p in reversed(list(model.parameters())):
            if self.groups[-1] and sum(q.nbytes for q in self.groups[-1]) >= bytes:
                self.groups.append([])
            self.groups[-1].append(p)
        self.flats = [torch.zeros(sum(p.numel() for p in g), dtype=g[0].dtype) for g in self.groups]
        self.starts = [sum(f.nbytes for f in self.flats[:i]) for i in range(len(self.flats))]
        self.missing: list[int] = []
        self.hooks = []
        for number, (group, flat) in enumerate(zip(self.groups, self.flats, strict=True)):
            for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad = part.view_as(p)
                self.hooks.append(p.register_post_accumulate_grad_hook(partial(self._ready, number)))

    def _ready(self, number: int, _: Tensor) -> None:
        self.missing[number] -= 1
        if self.when == "hook" and not self.missing[number]:
            self.link.send(self.flats[number], self.starts[number])

    def begin(self) -> None:
        torch._foreach_zero_(self.flats)
        self.missing = [len(g) for g in self.groups]

    def end(self) -> None:
        """Send the buckets that are left, and wait until all gradients are back."""
        if self.when in ("after", "one by one"):
            for flat, start in zip(self.flats, self.starts, strict=True):
                self.link.send(flat, start)
                if self.when == "one by one":
                    self.link.wait()
        self.link.wait()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def main() -> None:
    """Measure, print, and write the results."""
    gpu = parse_args(__doc__).device == "cuda"
    size, context = ("xl", 2048) if gpu else ("tiny", 64)
    with torch.device("cuda" if gpu else "cpu"):
        model = Transformer(SIZES[size], attend).to(torch.bfloat16)
        total = sum(p.nbytes for p in model.parameters())
        link = Link(total, gpu)
        rows = [{"what": "one message", "size": f"{b:,} B", "ms": f"{1e3 * s:.4f}"} for b, s in messages(link)]
        for tokens in TOKENS if gpu else (64,):
            batch = torch.randint(SIZES[size].vocabulary, (2, tokens // context, context)).unbind()
            makers = schedules(model, link, tokens == 4096 or not gpu)
            for name, (count, seconds) in compare(model, batch, makers, gpu).items():
                row = {"what": name, "size": f"{tokens:,} tokens", "messages": count, "ms": f"{1e3 * seconds:.2f}"}
                rows.append(row)
                print(row, flush=True)
            if tokens == 4096 or not gpu:
                found = {n: traced(model, batch, makers[n], gpu) for n in ("naive", "64 MB")}
                keep("link", found, "cuda" if gpu else "cpu")
    note = f"{size}: {total / MB:,.0f} MB of bfloat16 gradients. Forward and backward alone, by the device's clock;"
    if gpu:
        print(write("link", rows, f"{note} medians of {ROUNDS} in turn. Out and back: one message each way."))


def messages(link: Link) -> list[tuple[int, float]]:
    """Return (bytes, median seconds of one message there and back) per size."""
    found = []
    for bytes in (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28) if link.gpu else (2**12,):
        flat = torch.zeros(bytes, dtype=torch.uint8)

        def call(flat: Tensor = flat) -> None:
            link.send(flat, 0)
            link.wait()

        found.append((bytes, statistics.median(_seconds(call, link.gpu) for _ in range(9))))
    return found


def schedules(model: nn.Module, link: Link, all_sizes: bool) -> dict[str, Callable[[], Buckets]]:
    """Return a function that makes the Buckets of each schedule. all_sizes: with all BUCKETS, not only 64 MB."""
    makers = {
        "nothing sent": partial(Buckets, model, link, 0, "never"),
        "naive": partial(Buckets, model, link, 0, "one by one"),
        "flat": partial(Buckets, model, link, 10**12, "after"),
        "overlapped": partial(Buckets, model, link, 0),
    }
    return makers | {f"{mb} MB": partial(Buckets, model, link, mb * MB) for mb in (BUCKETS if all_sizes else (64,))}


def step(model: Transformer, batch: tuple[Tensor, ...], buckets: Buckets) -> None:
    """Forward and backward, until every gradient has come back."""
    buckets.begin()
    with record_function("forward"):
        loss = model.loss(*batch)
    with record_function("backward"):
        loss.backward()
    with record_function("rest"):
        buckets.end()


def compare(model: Transformer, batch: tuple[Tensor, ...], makers: dict, gpu: bool) -> dict[str, tuple[int, float]]:
    """Return (messages, median seconds) of each schedule. Schedules run in turn in each round."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    sent = {}
    for turn in range(3 if gpu else 1):
        for name, make in makers.items():
            buckets = make()
            sent[name] = len(buckets.flats)
            for _ in range(2 if turn == 0 else 1):
                step(model, batch, buckets)
            times[name] += [_seconds(partial(step, model, batch, buckets), gpu) for _ in range(ROUNDS // 3)]
            buckets.remove()
            for p in model.parameters():
                p.grad = None
    return {name: (sent[name], statistics.median(t)) for name, t in times.items()}


def traced(model: Transformer, batch: tuple[Tensor, ...], make: Callable[[], Buckets], gpu: bool) -> dict[str, list]:
    """Trace a step, in µs: [name, start, end] on the host; [start, end] of kernels, copies out and copies back."""
    buckets = make()
    for _ in range(2):
        step(model, batch, buckets)
    with torch.profiler.profile() as profile:
        step(model, batch, buckets)
        if gpu:
            torch.cuda.synchronize()
    buckets.remove()
    host, lanes = [], {"kernels": [], "out": [], "back": []}
    for e in sorted(profile.events(), key=lambda e: e.time_range.start):
        span = [e.time_range.start, e.time_range.end]
        if e.device_type == DeviceType.CPU and e.name in ("forward", "backward", "rest"):
            host.append([e.name, *span])
        elif e.device_type == DeviceType.CUDA and e.name not in ("forward", "backward", "rest"):
            lane = "out" if "DtoH" in e.name else "back" if "HtoD" in e.name else "kernels"
            lanes[lane].append(span)
    t0 = host[0][1]
    return {
        "host": [[name, *(round(t - t0) for t in ends)] for name, *ends in host],
        **{lane: [[round(t - t0) for t in ends] for ends in merged(spans, 30.0)] for lane, spans in lanes.items()},
    }


def _seconds(call: Callable[[], object], gpu: bool) -> float:
    if gpu:
        return timed(call)
    call()
    return 0.0


if __name__ == "__main__":
    main()
