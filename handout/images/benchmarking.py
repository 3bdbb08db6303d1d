"""Pictures of the chapter on benchmarking. Queues and rooflines are computed; samples come from the text."""

import math
import random
import statistics
from collections.abc import Sequence

import numpy
import torch
from torch.profiler import schedule

from lab.cluster.hardware import cluster
from lab.cluster.jobs import of_config
from lab.harness.compare import interval
from lab.model.transformer import SIZES
from reference.benchmarking.flops import flops
from reference.benchmarking.roofline import Bound, Device, roofline

from .picture import BLUE, GREEN, GREY, ORANGE, QUARTERS, YELLOW, Chart, Lane, Picture, picture, spaced

A100 = cluster("dgx-a100", 8).device
GPT2 = SIZES["small"]
FIRST = (180.0, 42.0, 14.0)  # the chapter's example: ms of the first steps, then of the steps after them
STEADY = (10.2, 9.9, 10.0, 10.4, 9.8, 10.1, 19.6, 10.0, 9.9, 10.1)


def queue(kernels: Sequence[tuple[str, float]], launch_us: float, words: str = "") -> tuple[Lane, Lane]:
    """Lanes of the host and the device. A kernel starts when it is launched and the previous kernel has ended."""
    launches, done = Lane(), Lane()
    for name, length in kernels:
        launches.add(0, launch_us, words)
        done.add(launches.end, length, name)
    return launches, done


@picture(236, "A host asks for three kernels and runs ahead of the device")
def clock(p: Picture) -> None:
    launches, done = queue([(f"kernel {i}", 100) for i in (1, 2, 3)], 10)
    us, launched, end = 1.25, launches.end, done.end
    p.words(62, 72, "host", "soft")
    p.words(62, 132, "device", "soft")
    p.bars(80, us, launches, BLUE, 28)
    p.box(16 + launched * us, 80, (end - launched) * us - 2, 28, GREY, "synchronize: wait", hatched=True)
    p.bars(140, us, done, ORANGE, 28)
    for t, text, anchor in ((launched, f"{launched:.0f} µs: asked", "start"), (end, f"{end:.0f} µs: done", "end")):
        x = 16 + t * us
        p.line(x, 40, x, 186, dashed=True)
        p.words(x, 30, text, "ink bold", anchor)
    p.line(16, 190, 424, 190, arrow=True)
    p.times(208, us, range(0, 301, 100), "µs")
    p.words(16, 228, "blue: the host asks, 10 µs a kernel", "soft")


@picture(300, "Thirteen steps: three slow ones first, one hiccup later")
def samples(p: Picture) -> None:
    """Times of thirteen steps on a logarithmic axis."""
    top, bottom, left, right = 44.0, 236.0, 56.0, 424.0

    def height(ms: float) -> float:
        return bottom - (bottom - top) * math.log(ms / 8) / math.log(200 / 8)

    p.words(12, 24, "ms a step", "soft")
    for ms in (10, 20, 50, 100, 200):
        p.parts.append(f'<path d="M{left:g} {height(ms):g} H{right:g}" class="faint"/>')
        p.words(left - 8, height(ms) + 5, str(ms), "soft small", "end")
    times = [*FIRST, *STEADY]
    for i, (x, ms) in enumerate(spaced(times, left + 18, 27.5), 1):
        colour = ORANGE if i <= len(FIRST) else BLUE
        p.parts.append(f'<circle cx="{x:g}" cy="{height(ms):.1f}" r="6" fill="{colour}" class="rim"/>')
        p.words(x, bottom + 18, str(i), "soft small", "middle")
    p.words(left + 96, height(times[0]) + 5, "warm-up: compiles, allocates")
    p.words(left + 18 + 27.5 * 9, height(19.6) - 14, "a hiccup", "ink", "middle")
    mean, median = statistics.mean, statistics.median
    p.words(16, 274, f"Steps 4 to 13: mean {mean(STEADY):.1f} ms, median {median(STEADY):.2f} ms.", "soft")
    p.words(16, 293, f"All thirteen: mean {mean(times):.1f} ms, median {median(times):.1f} ms.", "soft")


@picture(268, "The interval of a ratio after 8, 32 and 128 pairs, and the bar of 1.1")
def ratios(p: Picture) -> None:
    """The interval of a median ratio narrows as pairs are added. Ratios are random, around 1.2."""
    draw, bar = random.Random(0), 1.1
    drawn = [math.log(1.2) + draw.gauss(0, 0.15) for _ in range(128)]

    def x_of(log: float) -> float:
        return 20 + 390 * (math.exp(log) - 0.7) / 1.2

    for y, sample in spaced((drawn[:8], drawn[:32], drawn), 52, 62):
        low, high = interval(numpy.array(sample), 0.01)
        p.words(424, y, f"{len(sample)} pairs: {math.exp(low):.2f} to {math.exp(high):.2f}", "ink bold", "end")
        p.box(x_of(low), y + 12, x_of(high) - x_of(low), 20, BLUE)
        for x in map(x_of, sample):
            p.line(x, y + 34, x, y + 41)
        middle = x_of(statistics.median(sample))
        p.line(middle, y + 8, middle, y + 36)
    bar_x = x_of(math.log(bar))
    p.line(bar_x, 30, bar_x, 222, dashed=True)
    p.words(bar_x, 22, f"asked for: {bar}", "ink", "middle")
    p.line(16, 224, 424, 224)
    for ratio in (0.8, 1.0, 1.2, 1.4, 1.6, 1.8):
        p.words(x_of(math.log(ratio)), 242, f"{ratio:.1f}", "soft small", "middle")
    p.words(228, 262, "how many times as fast", "soft", "middle")


def bounds(context: int = 1024) -> dict[str, dict[str, Bound]]:
    """Rooflines of the layers of GPT-2's size, at batch 8 in bfloat16 on an A100."""
    device = Device(A100.name, A100.peak_flops, A100.hbm_bytes_per_s)
    return roofline(GPT2, batch=8, context=context, dtype=torch.bfloat16, device=device)


@picture(222, "A step is forward, backward and the optimizer: three modes, three sums")
def modes(p: Picture) -> None:
    """The parts of each mode of benchmark_model, with the times that the roofline allows."""
    forward, backward = (1e3 * sum(b[key].seconds for b in bounds().values()) for key in ("forward", "backward"))
    adamw = 1e3 * 28 * of_config(GPT2).parameters / A100.hbm_bytes_per_s
    parts = (
        (forward, BLUE, f"forward {forward:.1f}"),
        (backward, ORANGE, f"backward {backward:.1f}"),
        (adamw, GREEN, ""),
    )
    for y, name, count in ((30, "forward", 1), (88, "forward_backward", 2), (146, "step", 3)):
        p.words(16, y, f"{name}: {sum(ms for ms, _, _ in parts[:count]):.1f} ms", "ink bold")
        p.stack(16, y + 8, 13, parts[:count], 28)
    p.words(16, 212, f"Green: AdamW, {adamw:.1f} ms. Not in any mode: drawing tokens, copies.", "soft small")


@picture(248, "Two ranges on the host, their kernels, and the ranges projected onto the device")
def ranges(p: Picture) -> None:
    launches, done = queue((("q kᵀ", 60), ("softmax", 90), ("p v", 60), ("up", 90), ("down", 90)), 12)
    us = 0.98
    for y, lane in spaced(("host: ranges", "device: kernels", "device: ranges, projected"), 26, 70):
        p.words(16, y, lane, "soft")
    for first, last, name, colour in ((0, 2, "attention", BLUE), (3, 4, "mlp", GREEN)):
        host = launches[last][0] + launches[last][1] - launches[first][0]
        device = done[last][0] + done[last][1] - done[first][0]
        p.bars(36, us, [(launches[first][0], host, "")], colour, 28)
        p.bars(176, us, [(done[first][0], device, f"{name}: {device:.0f} µs")], colour, 28)
        p.bars(106, us, done[first : last + 1], colour, 28)
    p.words(88, 55, "attention 36 µs, mlp 24 µs", "ink")
    p.line(16, 226, 424, 226, arrow=True)
    p.words(16, 244, "time", "soft small")


@picture(300, "The share of attention's square in all FLOPs, as the context grows")
def square(p: Picture) -> None:
    c = Chart(p, (1024, 131072), (0, 1), log_y=False)
    lengths = [2**i for i in range(10, 18)]
    c.axes("context, tokens", "share of a forward pass's FLOPs", {n: f"{n // 1024}k" for n in lengths}, QUARTERS)
    points = []
    for n in lengths:
        counted = {name: f.forward for name, f in flops(GPT2, batch=1, context=n).items()}
        points.append((n, (counted["scores"] + counted["values"]) / sum(counted.values())))
    c.curve([(n, 1 - share) for n, share in points], BLUE, dashed=True)
    c.curve(points, ORANGE)
    for (n, share), dx in ((points[0], 6), (points[5], -18)):
        c.dot(n, share, ORANGE, f"{100 * share:.0f} %", "middle", dx, -12)
    c.label(2048, 0.87, "linear layers", dx=14, dy=-6)
    c.label(*points[2], "q kᵀ and p v", dx=8, dy=20)


@picture(312, "The layers of GPT-2's size on the roofline of an A100")
def layers(p: Picture) -> None:
    c = Chart(p, (8, 2048), (16, 700))
    intensities, speeds = (8, 32, 128, 512, 2048), (20, 50, 100, 200, 500)
    c.axes("intensity, FLOPs per byte", "TFLOP/s at most, A100, bfloat16", intensities, speeds)
    ridge = A100.peak_flops / A100.hbm_bytes_per_s
    c.curve([(x, min(A100.peak_flops, x * A100.hbm_bytes_per_s) / 1e12) for x in (8, ridge, 2048)], GREY)
    c.label(ridge, A100.peak_flops / 1e12, f"ridge: {ridge:.0f}", "middle", dy=-10)
    for name, colour, dx, dy in (("scores", ORANGE, 12, 6), ("q_proj", BLUE, 10, 26), ("head", GREEN, 0, -14)):
        b = bounds()[name]["forward"]
        anchor = {"scores": "start", "q_proj": "end", "head": "middle"}[name]
        c.dot(b.intensity, b.flops / b.seconds / 1e12, colour, f"{name}: {b.intensity:.0f}", anchor, dx, dy)


@picture(226, "Four ranks of which one is slow: the others wait for it")
def waiting(p: Picture) -> None:
    """Four ranks, one of them slow, with the times of the worked example."""
    typical, ms = (100, 104, 150, 98), 2.3
    slowest = max(typical)
    for r, (y, time) in enumerate(spaced(typical, 30, 38)):
        p.words(16, y + 20, f"rank {r}")
        p.box(72, y, time * ms - 2, 30, YELLOW if time == slowest else BLUE, f"computes {time} ms")
        if time < slowest:
            p.box(72 + time * ms, y, (slowest - time) * ms - 2, 30, GREY, f"waits {slowest - time}", hatched=True)
    p.line(72 + slowest * ms, 20, 72 + slowest * ms, 184, dashed=True)
    median = statistics.median(typical)
    p.words(16, 208, f"slowdown = {slowest} / {median:g} = {slowest / median:.2f}: over the median rank", "soft")


@picture(226, "A profiler's schedule over nine steps: skipped, warmed up, recorded, and when the handler is called")
def cycles(p: Picture) -> None:
    """Nine steps under schedule(wait=1, warmup=1, active=2, repeat=2), and the calls of the handler."""
    plan, left, width = schedule(wait=1, warmup=1, active=2, repeat=2), 88.0, 37.0
    lanes = {"NONE": ("wait", GREY), "WARMUP": ("warmup", YELLOW), "RECORD": ("active", BLUE)}
    for y, (name, _) in spaced(lanes.values(), 46, 40):
        p.words(16, y + 19, name, "ink")
    for x, step in spaced(range(9), left, width):
        action = plan(step).name
        for y, (lane, (_, colour)) in spaced(lanes.items(), 46, 40):
            if action.startswith(lane):
                p.box(x, y, width - 3, 28, colour, str(step), hatched=lane == "WARMUP")
            else:
                p.frame(x, y, width - 3, 28, kind="faint")
        if action == "RECORD_AND_SAVE":
            end = x + width - 1.5
            p.words(end - 2 * width, 28, f"cycle {step // 4 + 1}", "soft", "middle")
            p.line(end, 36, end, 172, dashed=True)
            p.words(end, 188, f"handler: {step - 1}, {step}", "ink", "middle")
    p.words(16, 216, "numbers: steps; hatched: traced, then discarded", "soft small")


@picture(268, "Small kernels: the host is too slow, and a CUDA graph asks once")
def launches(p: Picture) -> None:
    """Eight small kernels, one launch each, and as a graph."""
    us, kernel, launch = 6.0, 4.0, 7.0
    host, done = queue([("", kernel)] * 8, launch, "ask")
    p.words(16, 24, f"eight launches: {done.end:.0f} µs", "ink bold")
    p.bars(34, us, host, BLUE, 26)
    p.bars(66, us, done, ORANGE, 26)
    graph = launch + 8 * kernel
    p.words(16, 130, f"one graph: {graph:.0f} µs", "ink bold")
    p.box(16, 140, launch * us - 2, 26, GREEN, "ask")
    p.bars(172, us, [(launch + i * kernel, kernel, "") for i in range(8)], ORANGE, 26)
    p.line(16, 212, 424, 212, arrow=True)
    p.times(230, us, range(0, 61, 20), "µs")
    p.words(16, 256, "orange: the device works; gaps: it waits for the host", "soft")


@picture(318, "Two programs on a machine that slows down: one after the other, and in turn")
def drift(p: Picture) -> None:
    """While the machine is cool, a takes 10 ms and b 9.8 ms. "In turn" is a, b, b, a, and so on."""
    in_sequence, in_turn = [i >= 20 for i in range(40)], [i % 4 in (1, 2) for i in range(40)]
    for top, name, is_b in ((0, "all of a, then all of b", in_sequence), (150, "in turn", in_turn)):
        seen = [(9.8 if b else 10) * (1.1 - 0.1 * math.exp(-i / 20)) for i, b in enumerate(is_b)]
        of_a, of_b = ([ms for ms, b in zip(seen, is_b, strict=True) if b is which] for which in (False, True))
        ratio = statistics.median(a / b for a, b in zip(of_a, of_b, strict=True))
        p.words(16, top + 24, f"{name}: a / b = {ratio:.3f}", "ink bold")
        for y, ms in ((top + 122, 10), (top + 48, 11)):
            p.parts.append(f'<path d="M56 {y} H424" class="faint"/>')
            p.words(48, y + 5, f"{ms} ms", "soft small", "end")
        for (x, ms), b in zip(spaced(seen, 64, 9.2), is_b, strict=True):
            y = top + 122 - 74 * (ms - 10)
            p.box(x - 4, y - 4, 8, 8, ORANGE) if b else p.disc(x, y, BLUE)
    p.words(16, 308, "discs: a, 10 ms when cool; squares: b, 9.8 ms when cool", "soft small")


@picture(252, "Two streams: what two events read, and what a clock reads that waits for the device")
def events(p: Picture) -> None:
    """Two kernels of one stream between two events, and a copy on another stream."""
    us, launch, s1, s2 = 1.36, 10, Lane(), Lane()
    p.words(16, 22, "host, 10 µs a call", "soft")
    for i, (lane, length, name) in enumerate(((s1, 100, "kernel 1"), (s2, 250, "copy"), (s1, 100, "kernel 2"))):
        p.box(16 + i * launch * us, 30, launch * us - 1.5, 24, BLUE)
        lane.add((i + 1) * launch, length, name)
    for y, name, lane, colour, below, text in (
        (66, "stream 1", s1, ORANGE, 182, "two events on stream 1"),
        (122, "stream 2", s2, GREEN, 210, "a clock, after synchronize"),
    ):
        end = 16 + us * lane.end
        p.words(16, y + 10, name, "soft")
        p.bars(y + 18, us, lane, colour, 26)
        p.line(16, below, end, below, arrow=True)
        p.line(end, y + 44, end, below + 6, dashed=True)
        p.words(16, below + 17, f"{text}: {lane.end:.0f} µs", "ink bold")
    p.words(16, 246, "kernels 1 and 2 by themselves: 200 µs", "soft small")
