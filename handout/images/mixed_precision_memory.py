"""Pictures of the chapter on mixed precision: the memory of a step, by the exercise accounting and on a GPU."""

from dataclasses import replace

from lab.model.transformer import MODELS, SIZES
from reference.benchmarking.flops import flops
from reference.mixed_precision.accounting import Account, accounting

from .picture import BLUE, GREEN, GREY, ORANGE, Chart, Picture, load, picture, spaced

Moment = tuple[float, float, float, float, float]  # time; bytes of parameters, moments, gradients, activations


def two_steps() -> list[Moment]:
    """Memory over the first two float32 steps of GPT-2's size at batch 8, by `accounting`, without temporaries.

    A block's forward takes 1 unit of time, its backward 2, both ends and AdamW 1 each.
    """

    def account_of(layers: int) -> Account:
        config = replace(SIZES["small"], layers=layers)
        return accounting(config, batch=8, context=1024, precision="float32")

    layers = SIZES["small"].layers
    full, ends = account_of(layers), account_of(0)
    block = (full.activations - ends.activations) / layers
    block_gradients = (full.gradients - ends.gradients) / layers
    half = ends.gradients / 2  # nearly the head's gradients; the embedding's come last
    now = moments = gradients = kept = 0.0
    points = list[Moment]()

    def advance(time: float, more_kept: float = 0, more_gradients: float = 0, more_moments: float = 0) -> None:
        nonlocal now, moments, gradients, kept
        moments, gradients, kept = moments + more_moments, gradients + more_gradients, kept + more_kept
        now += time
        points.append((now, full.parameters, moments, gradients, kept))

    for first in (True, False):
        advance(0)
        for _ in range(layers):
            advance(1, block)
        advance(1, ends.activations)
        advance(1, -ends.activations, half)
        for _ in range(layers):
            advance(2, -block, block_gradients)
        advance(0, 0, half)
        advance(0, 0, 0, full.optimizer if first else 0)
        advance(1)
        advance(0, 0, -gradients)
    return points


@picture(372, "Memory of the first two steps of GPT-2's size at batch 8 over time, stacked")
def account(p: Picture) -> None:
    """The memory of two steps over time, stacked."""
    points = two_steps()
    last = points[-1][0]
    c = Chart(p, (0, last), (0, 16), log_x=False, log_y=False)
    c.bottom -= 46
    c.axes("", "GiB, float32", (), range(0, 17, 4))
    below = [0.0] * len(points)
    for part, colour in ((1, BLUE), (2, ORANGE), (3, GREEN), (4, GREY)):
        above = [low + point[part] / 2**30 for low, point in zip(below, points, strict=True)]
        rim = [c.pixel(point[0], y) for point, y in zip(points, above, strict=True)]
        rim += [c.pixel(point[0], y) for point, y in zip(reversed(points), reversed(below), strict=True)]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in rim)
        for fill in (colour, "url(#hatch)")[: 1 + (part == 4)]:
            p.parts.append(f'<path d="M{path}Z" fill="{fill}"/>')
        below = above
    for step, start in (("first step", 0.0), ("second step", last / 2)):
        sums = [(sum(point[1:]) / 2**30, point[0]) for point in points if start <= point[0] <= start + last / 2]
        peak, peak_time = max(sums, key=lambda pair: pair[0])
        c.label(peak_time, peak, f"{peak:.1f}", "middle", dy=-8)
        x, y = c.pixel(start + last / 4, 0)
        p.words(x, y + 38, step, "ink bold", "middle")
        for name, middle in (("forward", start + 6), ("backward", start + 26)):
            p.words(c.pixel(middle, 0)[0], y + 18, name, "soft small", "middle")
    x, _ = c.pixel(last / 2, 0)
    p.line(x, c.top, x, c.bottom, dashed=True)
    p.words(16, 342, "blue: parameters; orange: moments; green: gradients", "soft")
    p.words(16, 362, "hatched: what backward needs", "soft")


@picture(372, "Memory of a step over the context: states, and activations with and without checkpoints")
def activations(p: Picture) -> None:
    """GB of a step over the context, for two models: states, and activations without and with checkpointing."""
    px = 1.2  # per GB
    for top, name, words in ((22, "small", "0.16 billion parameters"), (190, "xl", "1.4 billion parameters")):
        p.words(16, top, words, "ink bold")
        for y, n in spaced((1024, 2048, 4096, 8192, 16_384), top + 10, 28):
            p.words(48, y + 15, f"{n // 1024}k", "ink", "end")
            for line, segment, colour in ((y, None, ORANGE), (y + 11, 1, BLUE)):
                usage = accounting(MODELS[name], batch=1, context=n, precision="bfloat16", segment=segment)
                states = (usage.total - usage.activations) / 1e9
                p.box(56, line, states * px, 10, GREY)
                p.box(56 + states * px, line, usage.activations / 1e9 * px, 10, colour, hatched=segment is None)
                if segment is None:
                    p.words(61 + usage.total / 1e9 * px, y + 10, f"{usage.total / 1e9:.0f}", "soft small")
        p.line(56 + 80 * px, top + 6, 56 + 80 * px, top + 146, dashed=True)
        p.words(62 + 80 * px, top + 18, "80 GB", "soft small")
    p.words(16, 364, "grey: states; hatched: activations; blue: checkpointed", "soft")


@picture(318, "One block: bytes kept, and extra FLOPs, by what is forgotten")
def selective(p: Picture) -> None:
    """One block of GPT-2's size in bfloat16: bytes kept and extra FLOPs, by the tensors that are recomputed."""
    config, shape = replace(SIZES["small"], layers=1), {"batch": 8, "context": 1024}
    full, ends = (accounting(replace(config, layers=n), **shape, precision="bfloat16").activations for n in (1, 0))
    counted = {name: f.forward for name, f in flops(config, **shape).items() if name != "head"}
    forward_and_backward = 3 * sum(counted.values())
    scores, values = (counted[name] / forward_and_backward for name in ("scores", "values"))
    numbers = 2 * 8 * 1024  # bytes of one number per token
    matrix = 2 * 8 * config.heads * 1024**2 + 1024**2  # probabilities, and the mask
    block, products = full - ends, numbers * (6 * config.width + 2 * config.hidden)
    rows = (
        ("everything kept", GREY, block, 0.0),
        ("attention's matrix forgotten", BLUE, block - matrix, scores),
        ("norms, silu and RoPE forgotten, too", BLUE, products + numbers * config.width, scores),
        ("only input and products with weights kept", GREEN, products, scores + values),
        ("only the input kept", ORANGE, numbers * config.width, 1 / 3),
    )
    for y, (name, colour, kept, extra) in spaced(rows, 24, 56):
        length = kept / block * 230
        p.words(16, y, name, "ink")
        p.box(16, y + 7, length, 24, colour)
        text = f"{kept / 2**20:.0f} MiB" + (f", {extra:.1%} more FLOPs".replace("%", " %") if extra else "")
        p.words(24 + length, y + 24, text, "ink bold")
    p.words(16, 308, "a block of GPT-2's size, batch 8, bfloat16", "soft")


@picture(330, "Memory that the allocator held over a training step, plain and checkpointed")
def remembered(p: Picture) -> None:
    """MiB after each allocation and free of a step, recorded on a GPU."""
    steps = load("data/memory.json")
    c = Chart(p, (0, 4700), (0, 12), log_x=False, log_y=False)
    c.axes("allocations and frees, in order", "GiB", range(0, 4001, 1000), range(0, 13, 4))
    for name, colour in (("plain", ORANGE), ("checkpointed", BLUE)):
        curve = [(i, mib / 1024) for i, mib in enumerate(steps[name]["MiB"])]
        peak = max(curve, key=lambda point: point[1])
        c.curve(curve, colour)
        c.label(*peak, f"{name}: {peak[1]:.1f}", dx=6, dy=-8)
        for (_, x), word in zip(steps[name]["phases"][:2], ("forward ends", "backward ends"), strict=True):
            c.dot(x, curve[x][1], colour, word if name == "plain" else "", dx=8, dy=16 if word[0] == "f" else -18)


@picture(330, "Memory over the batches of an evaluation: kept graphs add up, and no_grad keeps none")
def growing(p: Picture) -> None:
    """Memory of an evaluation of GPT-2's size at batch 8 in float32, by `accounting`, without temporaries."""
    usage, gib = accounting(SIZES["small"], batch=8, context=1024, precision="float32"), 2**30
    weights, graph = usage.parameters / gib, usage.activations / gib
    c = Chart(p, (0, 7), (0, 90), log_x=False, log_y=False)
    c.axes("batches evaluated", "GiB", range(8), range(0, 81, 20))
    c.curve([(0, weights), (7, weights + 7 * graph)], ORANGE)
    reads = [(n + i, weights + graph * graphs) for n in range(7) for i, graphs in ((0, n > 0), (1, 1 + (n > 0)))]
    c.curve(reads, BLUE, dashed=True)
    c.curve([(0, weights), (7, weights)], GREEN)
    (left, y), (right, _) = c.pixel(0, 80e9 / gib), c.pixel(7, 0)
    p.line(left, y, right, y, dashed=True)
    c.label(0, 80e9 / gib, "80 GB", dx=8, dy=18)
    c.label(4.6, weights + 4.6 * graph, "append(loss)", "end", dx=-10)
    c.label(3.5, 2 * graph, "append(loss.item())", "middle", dx=20, dy=-8)
    c.label(7, weights, "no_grad", "end", dx=-4, dy=-8)
