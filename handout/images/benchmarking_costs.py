"""Pictures of the chapter on benchmarking: lower bounds of layers, and measurements."""

from lab.cluster.hardware import cluster

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Chart, Lane, Picture, load, picture, spaced

A100 = cluster("dgx-a100", 8).device
LAUNCH_S = 10e-6  # seconds that the host needs to launch a kernel, as in Figure 1

# Operators of a block of SIZES["small"] on 1,024 tokens, measured in float32 on one CPU core by wall clock, in turn,
# medians of 21 rounds: name, ms with fresh output memory, ms with reused output memory (masked_fill_ for masked_fill),
# FLOPs of matrix products, bytes moved.
PEAK, BANDWIDTH = 70.6e9, 14.7e9  # same core, same rounds: a product of 2,048³, and a scaled copy of 50 MB
SCORES = 12 * 1024**2
MEASURED = (
    ("q_proj", 18.2, 17.6, 2 * 1024 * 768**2, 4 * (2 * 1024 * 768 + 768**2)),
    ("q kᵀ", 61.9, 26.3, 2 * SCORES * 64, 4 * (2 * 12 * 1024 * 64 + SCORES)),
    ("div", 41.7, 6.4, 0, 8 * SCORES),
    ("masked_fill", 68.1, 26.6, 0, 8 * SCORES + 1024**2),
    ("softmax", 58.2, 20.4, 0, 8 * SCORES),
    ("p v", 27.8, 27.4, 2 * SCORES * 64, 4 * (2 * 12 * 1024 * 64 + SCORES)),
    ("gate_proj", 47.4, 46.9, 2 * 1024 * 768 * 2048, 4 * (1024 * (768 + 2048) + 768 * 2048)),
)


def device(width: int, tokens: float) -> float:
    """A lower bound of a linear layer's seconds on the device, in 16 bits: memory traffic or arithmetic."""
    flops, moved = 2 * tokens * width**2, 2 * (width**2 + 2 * tokens * width)
    return max(flops / A100.peak_flops, moved / A100.hbm_bytes_per_s)


def layer(width: int, tokens: float) -> float:
    """A lower bound of a linear layer's seconds in a long chain: launch, memory traffic or arithmetic."""
    return max(LAUNCH_S, device(width, tokens))


@picture(186, "Three rates: of the host's launches, of arithmetic and of memory")
def rates(p: Picture) -> None:
    """Rates of an A100's host, compute and memory, and the work of each during one launch."""
    flops, moved = A100.peak_flops, A100.hbm_bytes_per_s
    columns = (
        ("host", BLUE, f"{1e6 * LAUNCH_S:.0f} µs a launch", "1 launch"),
        ("compute", ORANGE, f"{flops / 1e12:.0f} TFLOP/s", f"{LAUNCH_S * flops / 1e9:.1f} GFLOP"),
        ("memory", GREEN, f"{moved / 1e12:.3f} TB/s", f"{LAUNCH_S * moved / 1e6:.0f} MB"),
    )
    for x, (name, colour, rate, amount) in spaced(columns, 16, 150):
        p.box(x, 22, 108, 48, colour, name)
        p.words(x + 54, 94, rate, "ink bold", "middle")
        p.words(x + 54, 162, amount, "ink", "middle")
    p.line(126, 46, 163, 46, arrow=True)
    p.line(276, 46, 313, 46, arrow=True)
    p.line(313, 46, 277, 46, arrow=True)
    p.line(16, 112, 424, 112, dashed=True)
    p.words(16, 136, f"in the {1e6 * LAUNCH_S:.0f} µs of a launch:", "soft")


@picture(352, "Twice the batch: only where arithmetic sets the pace does the time nearly double")
def pace(p: Picture) -> None:
    """Three linear layers with a batch and with twice the batch: launch-bound, memory-bound and compute-bound."""
    left, us = 52.0, 1.82
    rows = (("overhead", 2048, 128), ("memory", 4096, 8), ("compute", 4096, 256))
    for y, (name, width, tokens) in spaced(rows, 22, 102):
        p.words(16, y, name, "ink bold")
        p.words(424, y, f"width {width:,}, {tokens} and {2 * tokens} tokens", "soft", "end")
        for top, times in ((y + 10, 1), (y + 48, 2)):
            p.words(left - 10, top + 22, f"{times} ×", "ink", "end")
            launches, kernels, length = Lane(), Lane(), 1e6 * device(width, times * tokens)
            for _ in range(3):
                p.box(left + launches.add(0, 1e6 * LAUNCH_S) * us, top, 1e6 * LAUNCH_S * us - 2, 10, BLUE)
                p.box(left + kernels.add(launches.end, length) * us, top + 13, length * us - 1.5, 18, ORANGE)
            p.words(left + kernels.end * us + 6, top + 27, f"{kernels.end:.0f} µs", "ink")
    p.words(16, 326, "blue: the host asks, 10 µs; orange: a kernel", "soft")
    p.words(16, 345, "1 ×, 2 ×: the batch, and twice the batch", "soft")


@picture(340, "Time of a linear layer over the number of tokens: flat at first, then rising")
def doubling(p: Picture) -> None:
    c = Chart(p, (1, 16384), (5, 2000))
    c.bottom, c.right = c.bottom - 4, c.right - 6
    c.axes("tokens in a batch", "µs a layer, at least; A100, bfloat16", [4**i for i in range(8)], (10, 100, 1000))
    for width, colour, dashed in ((4096, BLUE, False), (1024, ORANGE, True)):
        c.curve([(2 ** (i / 8), 1e6 * layer(width, 2 ** (i / 8))) for i in range(8 * 14 + 1)], colour, dashed)
        marks = ((8, "middle", 0), (4096, "end", 30)) if width == 4096 else ()
        for tokens, anchor, shift in marks:
            (x, y), (right, above) = (c.pixel(n, 1e6 * layer(width, n)) for n in (tokens, 2 * tokens))
            p.line(x, y, right, y)
            p.line(right, y, right, above, arrow=y - above > 8)
            for n in (tokens, 2 * tokens):
                c.dot(n, 1e6 * layer(width, n), colour)
            times = layer(width, 2 * tokens) / layer(width, tokens)
            p.words((x + right) / 2 - shift, above - 14, f"× {times:.2f}", "ink bold", anchor)
    c.label(1.3, 1e6 * layer(4096, 1), "width 4,096: weights' bytes", dy=-34)
    c.label(1.3, 10, "width 1,024: the host asks, 10 µs", dy=20)
    c.label(1300, 300, "arithmetic", "end", dx=-8, dy=-26)


@picture(256, "silu(g) · u: two kernels move five numbers of memory, one kernel moves three")
def fused(p: Picture) -> None:
    """The traffic of silu(g) · u between memory and kernels, in two kernels and in one."""
    rows = (  # left edge, name, numbers in memory, kernels as (left, width, name), moves as (number, shift, read)
        (16, "two kernels", ("g", "silu(g)", "u", "out"), ((0, 84, "silu"), (94, 144, "multiply")),
         ((0, 0, True), (1, -16, False), (1, 16, True), (2, 0, True), (3, 0, False))),
        (286, "one kernel", ("g", "u", "out"), ((0, 140, "silu, multiply"),),
         ((0, 0, True), (1, 0, True), (2, 0, False))),
    )  # fmt: skip
    for left, name, memory, kernels, moves in rows:
        cell = 61 if len(memory) == 4 else 48
        p.words(left, 24, name, "ink bold")
        for x, words in spaced(memory, left, cell):
            p.box(x, 36, cell - 6, 34, BLUE, words)
        for start, width, words in kernels:
            p.box(left + start, 136, width, 34, ORANGE, words)
        for i, shift, read in moves:
            x = left + cell * i + (cell - 6) / 2 + shift
            p.line(x, *(73, x, 132) if read else (133, x, 74), arrow=True)
        moved = 2 * 8192 * 2048 * len(moves)
        p.words(left, 194, f"{len(moves)} moves: {moved / 1e6:.0f} MB", "ink")
        p.words(left, 214, f"{1e6 * moved / A100.hbm_bytes_per_s:.0f} µs", "ink bold")
    p.line(268, 14, 268, 216, dashed=True)
    p.words(16, 242, "an arrow: a number of 2 bytes, 16.8 million times", "soft")


@picture(296, "Seven operators of a block: bound and measured time, and the cost of fresh pages")
def measured(p: Picture) -> None:
    """Time of a block's operators: the lower bound, the rest, and the cost of fresh memory."""
    ms = 2.9
    p.words(16, 24, "one core of a CPU, ms", "soft")
    p.words(424, 24, "bound / measured", "soft", "end")
    for y, (name, fresh, old, flops, moved) in spaced(MEASURED, 38, 31):
        bound = 1e3 * max(flops / PEAK, moved / BANDWIDTH)
        p.words(104, y + 17, name, "ink", "end")
        known = max(bound, min(old, fresh))
        p.box(112, y, fresh * ms, 24, GREY)
        if fresh - known > 2:
            p.box(112 + known * ms, y, (fresh - known) * ms, 24, ORANGE, hatched=True)
        p.box(112, y, bound * ms, 24, BLUE)
        p.words(424, y + 17, f"{bound:.0f} / {fresh:.0f}: {bound / fresh:.0%}".replace("%", " %"), "ink", "end")
    p.words(16, 272, "blue: the bound; grey: what more it takes; hatched:", "soft")
    p.words(16, 290, "what fresh pages of memory add", "soft")


@picture(330, "A training step in a profiler's trace: of the tiny model, and of the small one")
def traced(p: Picture) -> None:
    """The host's phases, and the load of the device. The last span is AdamW's range, recorded with the kernels."""
    sizes = load("data/trace.json")
    for top, (size, words) in spaced((("tiny", "tiny, 4 × 128 tokens"), ("small", "small, 8 × 1,024 tokens")), 22, 152):
        phases, start, end = sizes[size]["host"][3:6], sizes[size]["host"][3][1], sizes[size]["host"][6][1]
        *spans, adamw = [(a - start, b - start) for a, b in sizes[size]["device"] if a >= start and b <= end]
        px = 408 / (end - start)
        p.words(16, top, f"{words}: {(end - start) / 1000:.1f} ms", "ink bold")
        for (name, begins, ends), colour in zip(phases, (BLUE, GREEN, YELLOW), strict=True):
            width = (ends - begins) * px
            p.box(16 + (begins - start) * px, top + 12, width - 1, 26, colour, name if width > 60 else "")
        p.box(16 + adamw[0] * px, top + 44, (adamw[1] - adamw[0]) * px, 40, GREY, hatched=True)
        p.busy(top + 84, px, spans, ORANGE, 40, end - start)
        step = 5 if size == "tiny" else 20
        p.times(top + 100, 1000 * px, range(0, int((end - start) / 1000) + 1, step), "ms")
    p.words(16, 322, "host above (yellow: optimizer), device below (hatched: AdamW)", "soft small")


@picture(340, "Kernels as measured on an H200, under the roofline of its data sheet")
def attained(p: Picture) -> None:
    """Dots at (FLOPs per byte, TFLOP/s) from benchmarks/results/chapters.md, if each byte moves once."""
    peak, tb_per_s, numbers, scores = 989.0, 4.8, 8192 * 2048, 96 * 1024**2
    c = Chart(p, (0.1, 8192), (0.01, 3000))
    ticks = [10**i for i in range(-2, 4)]
    c.axes("intensity, FLOPs per byte", "TFLOP/s on an H200, bfloat16", ticks[1:], ticks)
    c.curve([(x, min(peak, x * tb_per_s)) for x in (0.1, peak / tb_per_s, 8192)], GREY)
    for name, intensity, speed, colour, anchor, dx, dy in (
        ("x + 1", 0.25, 0.25 * 4.294, BLUE, "start", 8, 20),
        ("x + 1, 65,536 numbers", 0.25, 0.25 * 0.07585, ORANGE, "start", 10, 5),
        ("silu(g) · u", 4 / 6, 4 * numbers / 26.6e6, BLUE, "start", 10, 6),
        ("q kᵀ, p v", 128 * scores / (2 * scores + 4 * 96 * 1024 * 64), 128 * scores / 63.281e6, BLUE, "end", -10, 0),
        ("gate_proj", 523, 2 * numbers * 768 / 42.2e6, BLUE, "end", 6, -22),
        ("n = 256", 256 / 3, 5.27, ORANGE, "start", 10, 5),
        ("n = 1,024", 1024 / 3, 203, ORANGE, "middle", 8, 23),
        ("n = 8,192", 8192 / 3, 765, BLUE, "end", 34, -37),
    ):  # fmt: skip
        share, (x, y) = 100 * speed / min(peak, intensity * tb_per_s), c.pixel(intensity, speed)
        if dy < -20:  # a label above the roof
            p.line(x, y, x, y + dy + 4)
        c.dot(intensity, speed, colour, f"{name}: {share:.{1 if share < 10 else 0}f} %", anchor, dx, dy)
