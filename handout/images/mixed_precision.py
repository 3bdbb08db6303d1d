"""Pictures of the chapter on mixed precision and memory. GRADIENTS and ROUNDED were measured; the rest is computed."""

import math
from collections.abc import Sequence
from itertools import accumulate as sums

import torch

from reference.mixed_precision.checkpoint_plan import checkpoint_plan
from reference.mixed_precision.loss_scaler import LossScaler

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Chart, Lane, Picture, picture, spaced

FORMATS = (  # name, bits of the exponent, bits of the fraction, limit of the range
    ("float32", 8, 23, 2.0**128), ("bfloat16", 8, 7, 2.0**128),
    ("float16", 5, 10, 65504.0), ("E5M2", 5, 2, 57344.0), ("E4M3", 4, 3, 448.0),
)  # fmt: skip
LAYERS, INPUT, SAVED = 8, 1, 4  # the example: number of layers; units of a layer's input; units that a layer saves

# Measured on a CPU in float32: gradients of the outputs of all linear layers of SIZES["tiny"], after 100 steps of AdamW
# (learning rate 3e-3, seed 0) on the handout's text, at 32 sequences of 256 tokens. By e, the number of gradients with
# 2^e ≤ magnitude < 2^(e+1); -45 also counts all smaller gradients except zeros.
GRADIENTS = dict(enumerate((
    352, 138, 205, 279, 233, 302, 390, 601, 1089, 1804, 3047, 4939, 8345, 15374, 39618, 197382, 504736, 457636, 453831,
    438959, 496945, 666506, 909059, 1173526, 1359076, 1338725, 1129668, 854414, 705473, 575153, 376878, 210819, 97331,
    28058, 3030, 110, 1,
), start=-45))  # fmt: skip

# Measured on a CPU: SIZES["tiny"] on three chapters of the handout, at 16 sequences of 128 tokens, AdamW (learning rate
# 2e-3, seed 2), weights in float32. Both factors of each product of the blocks' linear layers, forward and backward,
# are rounded to E4M3 or bfloat16; a scale maps a tensor's largest magnitude to 448. Numbers are mean losses of 8 steps.
# In the first step without scales 99 % of the gradients of these layers' outputs become zero. With one scale per 16
# numbers the last loss is 2.32.
ROUNDED = {
    "no scale": (5.07, 4.09, 3.59, 3.47, 3.36, 3.37, 3.31, 3.31, 3.26, 3.2,
                 3.16, 3.1, 3.06, 3.04, 3.05, 3.0, 3.02, 2.96, 2.97, 2.93),
    "one scale": (4.96, 3.98, 3.52, 3.34, 3.17, 3.09, 2.97, 2.93, 2.85, 2.84,
                  2.81, 2.75, 2.69, 2.65, 2.6, 2.53, 2.51, 2.43, 2.41, 2.33),
    "bfloat16": (4.96, 3.98, 3.52, 3.34, 3.17, 3.09, 2.97, 2.93, 2.85, 2.84,
                 2.81, 2.75, 2.7, 2.65, 2.6, 2.54, 2.52, 2.44, 2.42, 2.35),
}  # fmt: skip


@picture(420, "Five dtypes: their ranges on a logarithmic axis, and their numbers from 1 to 2")
def formats(p: Picture) -> None:
    """The range of each dtype on a logarithmic axis, and its numbers from 1 to 2."""
    left, right = 112.0, 424.0

    def x_of(exponent: float) -> float:
        return left + (exponent + 150) * (right - left) / 280

    p.words(16, 22, "exponent + fraction", "soft")
    p.words(right, 22, "range: powers of two", "soft", "end")
    for y, (name, exponent, fraction, largest) in spaced(FORMATS, 34, 35):
        normal = 2 - 2 ** (exponent - 1)
        p.words(16, y + 11, name, "ink bold")
        p.words(16, y + 25, f"{exponent} + {fraction} bits", "soft small")
        p.box(x_of(normal - fraction), y, x_of(normal) - x_of(normal - fraction), 22, YELLOW, hatched=True)
        p.box(x_of(normal), y, x_of(math.log2(largest)) - x_of(normal), 22, ORANGE)
    for tick in (-126, -64, -14, 16, 64, 128):
        p.words(x_of(tick), 222, power(tick), "soft small", "middle" if tick < 128 else "end")
    p.words(16, 246, "hatched: subnormal, with fewer digits", "soft")
    p.words(right, 272, "numbers from 1 to 2", "soft", "end")
    for y, (name, _, fraction, _) in spaced(FORMATS, 280, 24):
        p.words(16, y + 14, name, "ink bold")
        if fraction > 8:
            p.box(left, y, right - left, 18, BLUE, f"a number each {power(-fraction)}")
            continue
        for x, _ in spaced(range(2**fraction + 1), left, (right - left) / 2**fraction):
            p.line(x, y + 1, x, y + 17)
    for x, tick, anchor in ((left, "1", "start"), ((left + right) / 2, "1.5", "middle"), (right, "2", "end")):
        p.words(x, 414, tick, "soft small", anchor)


def power(exponent: int) -> str:
    """Format a power of two with a superscript."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@picture(340, "Gradients by power of two, plain and scaled by 2¹⁶, over the range of float16")
def range_(p: Picture) -> None:
    """Measured gradients by power of two, plain and scaled, over the ranges of the dtypes."""
    low, high, floor, unit = -42, 18, 196, 148 / max(GRADIENTS.values())
    smallest, normal, end = -24, -14, 16  # float16's exponents: smallest subnormal, smallest normal, first overflow
    lost = {scale: sum(n for e, n in GRADIENTS.items() if e + scale < smallest - 1) for scale in (0, 16)}
    share = {scale: n / sum(GRADIENTS.values()) for scale, n in lost.items()}

    def x_of(exponent: float) -> float:
        return 16 + (exponent - low) * 408 / (high - low)

    for tick in (smallest, normal, end):
        p.line(x_of(tick), 40, x_of(tick), floor + 56, dashed=True)
    width = x_of(1) - x_of(0) - 1
    outline = [f"M{x_of(low):g} {floor}"]
    for e, n in GRADIENTS.items():
        zeroed = e < smallest - 1  # below half of the smallest subnormal
        if e >= low:
            p.box(x_of(e), floor - n * unit, width, n * unit, ORANGE if zeroed else BLUE, hatched=zeroed)
        outline.append(f"V{floor - n * unit:.1f} H{x_of(e + 17):.1f}" if e > low else f"H{x_of(e + 17):.1f}")
    p.parts.append(f'<path d="{" ".join(outline)} V{floor}" class="curve" stroke="{GREEN}"/>')
    p.line(16, floor, 424, floor)
    p.line(x_of(-20.5), 34, x_of(-4.5), 34, arrow=True)
    p.words(x_of(-12.5), 26, "× 2¹⁶", "ink bold", "middle")
    for y, words in ((76, "become zero:"), (96, f"{share[0]:.1%}"), (116, f"scaled {share[16]:.3%}")):
        p.words(16, y, words.replace("%", " %"), "ink bold" if y == 96 else "ink")
    y = floor + 8
    p.box(x_of(smallest), y, x_of(normal) - x_of(smallest) - 2, 20, YELLOW, hatched=True)
    p.words((x_of(smallest) + x_of(normal)) / 2 - 1, y + 15, "subnormal", "in small", "middle")
    p.box(x_of(normal), y, x_of(end) - x_of(normal), 20, BLUE, "float16: normal")
    p.box(16, y + 26, 408, 20, GREY, "bfloat16, float32: from 2⁻¹²⁶ to 2¹²⁷, wider than this")
    for tick in (-40, -32, smallest, normal, -8, 0, 8, end):
        p.words(x_of(tick), floor + 74, power(tick) if tick else "1", "soft small", "middle" if tick < end else "end")
    p.words(16, floor + 98, "filled: gradients as they are; outline: scaled", "soft")
    p.words(16, floor + 118, "hatched orange: float16 rounds them to zero", "soft")


@picture(196, "Neighbours above 1: 1 + 2⁻⁹ lies between two numbers of bfloat16, nearer to 1")
def gaps(p: Picture) -> None:
    """The numbers from 1 to 1 + 2⁻⁶ in two dtypes, and where 1 + 2⁻⁹ lies."""
    unit = 400 * 64  # pixels per 1; the picture is 1/64 wide
    for y, name, bits in ((60, "bfloat16: a number each 2⁻⁷", 7), (130, "float16: a number each 2⁻¹⁰", 10)):
        p.words(16, y - 22, name, "ink bold")
        p.line(16, y, 424, y)
        for x, _ in spaced(range(2**bits // 64 + 1), 20, unit / 2**bits):
            p.line(x, y - 8, x, y + 8)
    x = 20 + unit / 512
    for y in (60, 130):
        p.parts.append(f'<circle cx="{x:g}" cy="{y}" r="6" fill="{ORANGE}" class="rim"/>')
    p.line(x, 76, 24, 76, arrow=True)
    p.words(x + 8, 82, "1 + 2⁻⁹ rounds to 1", "ink")
    p.words(x + 8, 156, "1 + 2⁻⁹ is a number", "ink")
    for x, text, anchor in ((20, "1", "start"), (220, "1 + 2⁻⁷", "middle"), (420, "1 + 2⁻⁶", "end")):
        p.words(x, 184, text, "soft small", anchor)


def running(dtype: torch.dtype, until: int) -> list[tuple[float, float]]:
    """Add ones in a dtype. Return points (n, sum) at powers of two and at the end."""
    one, total, points = torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype), []
    for n in range(1, until + 1):
        total = total + one
        if math.log2(n).is_integer() or n == until:
            points.append((n, total.item()))
    return points


@picture(300, "Running sums of ones: bfloat16 stops at 256, float16 at 2,048")
def stuck(p: Picture) -> None:
    c = Chart(p, (1, 8192), (1, 16384))
    ticks = (1, 16, 256, 2048, 8192)
    c.axes("ones added", "the sum so far", ticks, ticks)
    c.curve(running(torch.float32, 8192), GREEN)
    for dtype, colour, name in ((torch.float16, BLUE, "float16"), (torch.bfloat16, ORANGE, "bfloat16")):
        points = running(dtype, 8192)
        c.curve(points, colour, dashed=True)
        c.label(*points[-1], name, "end", dx=-4, dy=16)
    c.label(8192, 8192, "float32", "end", dx=-30, dy=-4)


@picture(300, "The loss scale: it doubles after 20 good steps and halves at an overflow")
def scales(p: Picture) -> None:
    """A loss scale over 200 steps. Gradients overflow above a limit that falls at step 120."""
    scaler, points, skipped = LossScaler(2.0**12, interval=20), [], []
    for step in range(200):
        limit = 2.0**15.5 if step < 120 else 2.0**13.5  # gradients grow in the middle of training
        points += [(step, scaler.scale), (step + 1, scaler.scale)]
        if scaler.scale > limit:
            skipped.append((step, scaler.scale))
        scaler.update(scaler.scale <= limit)
    c = Chart(p, (0, 200), (2.0**11, 2.0**17), log_x=False)
    powers = {2.0**i: power(i) for i in range(11, 18)}
    c.axes("step", "loss scale; interval of 20 steps", range(0, 201, 50), powers)
    c.curve(points, BLUE)
    for point in skipped:
        c.dot(*point, ORANGE)
    c.label(60, 2.0**16, "dots: infinite, step skipped", dx=-60, dy=-14)
    c.label(120, 2.0**12, "from step 120 gradients", "start", dx=-20, dy=-4)
    c.label(120, 2.0**12, "are four times as large", "start", dx=-20, dy=14)


@picture(320, "A step in mixed precision: 16 bits on the left, float32 on the right")
def mixed_step(p: Picture) -> None:
    p.words(110, 24, "16 bits", "ink bold", "middle")
    p.words(332, 24, "float32", "ink bold", "middle")
    for y, words in spaced(("weights", "forward", "backward", "scaled gradients"), 40, 66):
        p.box(36, y, 150, 34, BLUE, words)
    for y, words in spaced(("masters, moments", "optimizer steps", "clip", "÷ scale, finite?", "gradients"), 40, 50):
        p.box(254, y, 156, 32, ORANGE if y == 40 else GREEN, words)
    for y in (40, 106, 172):
        p.line(110, y + 36, 110, y + 62, arrow=True)
    for y in (90, 140, 190, 240):
        p.line(332, y - 2, 332, y - 16, arrow=True)
    p.line(250, 57, 190, 57, arrow=True)
    p.words(220, 50, "round", "soft small", "middle")
    p.line(190, 255, 250, 255, arrow=True)
    p.words(220, 248, "cast", "soft small", "middle")
    p.words(118, 160, "× scale", "soft small")
    p.words(16, 300, "Anticlockwise: round, compute, cast, divide, clip, step.", "soft")


@picture(262, "A chain of eight layers in segments of 2: what is kept at three moments")
def segments(p: Picture) -> None:
    """Tensors in memory at three moments of a checkpointed chain of eight layers."""
    size = 2
    moments = (("after forward: four inputs", LAYERS), ("backward of layers 6, 7", 6), ("backward of layers 0, 1", 0))
    for y, (name, layer) in spaced(moments, 34, 74):
        p.words(16, y - 8, name, "ink bold")
        for x, i in spaced(range(LAYERS), 16, 51):
            if layer <= i < layer + size:
                p.box(x, y, 47, 34, BLUE, "all 4")
            elif i % size == 0 and i < layer:
                p.box(x, y, 47, 34, ORANGE, "in: 1")
            else:
                p.frame(x, y, 47, 34, str(i))
    p.words(16, 252, "dashed: nothing is kept", "soft")


def memory_curve(lengths: Sequence[int]) -> list[tuple[float, float]]:
    """Points (time, units kept) of a chain in segments of these lengths. A forward takes 1, a backward 2."""
    points, now, memory = list[tuple[float, float]](), 0.0, 0.0

    def spend(seconds: float, change: float) -> None:
        nonlocal now, memory
        points.extend([(now, memory + max(change, 0)), (now + seconds, memory + max(change, 0))])
        now, memory = now + seconds, memory + change

    starts = [0, *sums(lengths)][:-1]
    checkpointed = len(lengths) > 1
    for layer in range(sum(lengths)):
        spend(1, SAVED if not checkpointed else INPUT if layer in starts else 0)
    for start, length in reversed(list(zip(starts, lengths, strict=True))):
        for layer in range(start, start + length) if checkpointed else ():
            spend(1, SAVED - INPUT if layer == start else SAVED)
        for _ in range(length):
            spend(2, -SAVED)
    return points


@picture(312, "Memory of a chain of eight layers over time: everything kept, and checkpointed")
def chain(p: Picture) -> None:
    plan = checkpoint_plan([INPUT] * LAYERS, [SAVED] * LAYERS)
    c = Chart(p, (0, 33), (0, 36), log_x=False, log_y=False)
    c.axes("time: a layer's forward is 1, its backward 2", "units kept", range(0, 33, 8), range(0, 33, 8))
    for lengths, colour, dashed in (((LAYERS,), GREY, False), ((2,) * 4, ORANGE, True), (plan.segments, BLUE, False)):
        c.curve(memory_curve(lengths), colour, dashed)
    c.label(9, 33, "everything kept: 32", dx=14, dy=4)
    c.label(24, 14, "segments of 2: 11", dx=-30)
    c.label(24, 11, f"best plan: {plan.peak}", dx=-30)


@picture(292, "Ten equal layers: equal segments peak unequally, unequal ones equally")
def stairs(p: Picture) -> None:
    """Ten layers that keep 1 unit each, in equal segments and in the segments of the best plan."""
    plan = checkpoint_plan([1] * 10, [1] * 10).segments
    for left, name, lengths in ((16, "equal segments", (3, 3, 3, 1)), (236, "the best plan", plan)):
        peaks = [i + length for i, length in enumerate(lengths)]
        p.words(left, 24, f"{name}: {max(peaks)}", "ink bold")
        for i, (x, length) in enumerate(spaced(lengths, left, 48)):
            for j in range(i + length):
                p.box(x, 196 - 26 * (j + 1), 42, 23, ORANGE if j < i else BLUE)
            p.words(x + 21, 214, str(length), "ink", "middle")
        p.line(left, 198, left + 190, 198)
    p.words(16, 236, "Below: layers in each segment. A bar: what is kept", "soft")
    p.words(16, 256, "while its segment runs again. Orange: inputs of", "soft")
    p.words(16, 276, "the segments before it. Blue: its own layers.", "soft")


@picture(222, "Backward of four layers: copies fetched when needed, and one layer before")
def offload(p: Picture) -> None:
    """Backward of four layers of 3 ms each, with copies of 2 ms: fetched when needed, or one layer before."""
    ms, layer_ms, copy = 19.5, 3.0, 2.0
    p.words(16, 22, "upper lane: backward; lower lane: copies", "soft")
    for top, name, early in ((48, "fetched when needed", False), (126, "fetched one layer before", True)):
        compute, copies, before = Lane(), Lane(), 0.0
        for layer in (3, 2, 1, 0):
            copies.add(before if early else compute.end, copy, f"get {layer}")
            before = compute.add(copies.end, layer_ms, f"layer {layer}")
        p.lanes(top, name, ms, compute, copies)
    p.clock(196, ms, 20)


@picture(300, "Loss over 160 steps: without scales E4M3 falls behind; with them it follows bfloat16")
def rounded(p: Picture) -> None:
    """The loss with factors in E4M3, without scales and with one scale per tensor, next to bfloat16."""
    c = Chart(p, (0, 160), (2, 5.2), log_x=False, log_y=False)
    c.axes("step", "loss", range(0, 161, 40), range(2, 6))
    for name, colour, dashed in (("no scale", ORANGE, False), ("one scale", BLUE, False), ("bfloat16", GREEN, True)):
        c.curve([(8 * i + 4, loss) for i, loss in enumerate(ROUNDED[name])], colour, dashed)
    c.label(156, 3.08, "E4M3, no scale", "end", dy=-8)
    c.label(100, 2.4, "bfloat16, and E4M3 with", "end", dy=-4)
    c.label(100, 2.4, "a scale for each tensor", "end", dy=14)


def fitted(weights: torch.dtype, gradients: torch.dtype, steps: int = 450) -> list[tuple[float, float]]:
    """Points (step, loss) of a training of 64 weights, which forward rounds to bfloat16.
    Gradients are divided by N = 2²⁰ before they are rounded, and multiplied by N in the update."""
    goals, w, points = torch.tensor([(i - 31.5) / 16 for i in range(64)]), torch.zeros(64), []
    for step in range(steps + 1):
        error = w.bfloat16().float() - goals
        points.append((step, math.fsum(error.double().square().tolist()) / 64))
        gradient = (error / 2**20).to(gradients).float()
        w = (w - 0.01 * 2**20 * gradient).to(weights).float()
    return points


@picture(300, "Three losses on a logarithmic axis: one falls, and two stand still, each for a cause of its own")
def stalled(p: Picture) -> None:
    c = Chart(p, (0, 450), (1e-5, 10), log_x=False)
    c.axes("step", "loss", range(0, 451, 150), {10.0**e: f"10{power(e)[1:]}" for e in range(-5, 2)})
    for step, name, dy, colour, dtypes in (
        (450, "bfloat16 weights, no masters", -12, ORANGE, (torch.bfloat16, torch.float32)),
        (450, "float16, no scaling", -28, BLUE, (torch.float32, torch.float16)),
        (450, "masters, float32 gradients", 26, GREEN, (torch.float32, torch.float32)),
    ):
        points = fitted(*dtypes)
        c.curve(points, colour, dashed=colour != GREEN)
        c.label(*points[step], name, "end", dy=dy)
