"""Pictures of the chapter on data parallelism: machines, streams, batch size and scaling."""

import math

import torch

from lab.cluster.costs import ring_cost
from lab.cluster.hardware import cluster

from .ddp import LAYERS, LAYERS_BACKWARD_S, LAYERS_BUCKET, RANKS, bucket_sends, cost_ms
from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Bar, Chart, Picture, picture, spaced
from .planning import MEASURED

PARAMETERS, TOKENS, RANK_FLOPS = 7e9, 4e6, 0.4 * 989e12  # of the model, per global batch, per rank (40 % of the peak)
GRADIENTS = 4 * PARAMETERS  # bytes in float32
DDP_BUCKET = 25 * 2**20
H100S = cluster("dgx-h100", 16)
INSIDE, CARD = H100S.inside, H100S.between
TREE_S = 4e-6  # seconds per hop of a tree over NVLink, by NCCL
FLAT_S = 4.7e-6  # mean seconds per hop of a flat ring; seven of eight hops are inside a machine


@picture(420, "A ring and a tree over two machines of eight GPUs")
def machines(p: Picture) -> None:
    """Paths of a ring and a tree through two machines: NVLink inside; between them card, leaf, spine, leaf, card."""

    def draw(*points: tuple[float, float]) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        p.parts.append(f'<path d="M{path}" class="line" style="stroke: {ORANGE}" marker-end="url(#tip)"/>')

    gpus = [[x + 12 + 25 * i for i in range(8)] for x in (16, 225)]
    between = (((gpus[0][7], gpus[1][0]), 152), ((gpus[1][7], gpus[0][0]), 172))
    up = (((gpus[1][0], gpus[0][0]), 152),)
    looks = (("one of eight rings", INSIDE.alpha_s, 1, between), ("one tree, on its way up", TREE_S, -1, up))
    for t, (name, hop, step, crossings) in spaced(looks, 22, 204):
        p.words(16, t, name, "ink bold")
        p.words(424, t, f"NVLink of a GPU: {INSIDE.bytes_per_s / 1e9:.1f} GB/s", "soft small", "end")
        p.frame(16, t + 142, 408, 40, kind="line")
        p.words(220, t + 167, f"spine switch: {1e6 * CARD.alpha_s:g} µs a hop between machines", "ink small", "middle")
        for row in gpus:
            p.frame(row[0] - 12, t + 8, 199, 34, kind="line")
            p.words(row[0] + 88, t + 23, f"NVLink switch: {1e6 * hop:g} µs a hop", "ink small", "middle")
            p.words(row[0] + 88, t + 110, f"8 cards of {CARD.bytes_per_s / 1e9:.1f} GB/s", "soft small", "middle")
            p.frame(row[0] - 12, t + 116, 199, 20, "leaf switch", "line")
            for i, x in enumerate(row):
                p.box(x - 11, t + 56, 22, 22, BLUE, str(i))
                p.box(x - 11, t + 84, 22, 12, GREY)
            for x, x2 in zip(row[::step], row[::step][1:], strict=False):
                draw((x + 4 * step, t + 56), (x + 4 * step, t + 34), (x2 - 4 * step, t + 34), (x2 - 4 * step, t + 56))
        for (x, x2), y in crossings:
            draw((x, t + 78), (x, t + y), (x2, t + y), (x2, t + 78))


@picture(320, "The rate of an all-reduce over its size: by (3), and measured")
def bandwidth(p: Picture) -> None:
    """An all-reduce's rate over its size: by equation (3), and measured by Austin et al. (2025) and Bekman (2026)."""
    c = Chart(p, (1e6, 3e10), (0, 500), log_y=False)
    named = {1e6: "1 MB", 1e7: "10 MB", 1e8: "100 MB", 1e9: "1 GB", 1e10: "10 GB"}
    c.axes("all-reduce", "GB/s that each rank sends; lines: (3), dots: measured", named, range(0, 501, 100))
    lines = ((8, INSIDE.alpha_s, INSIDE.bytes_per_s, BLUE, False), (32, FLAT_S, 8 * CARD.bytes_per_s, ORANGE, True))
    for world, alpha_s, rate, colour, dashed in lines:
        sizes = [10 ** (6 + i / 8) for i in range(37)]
        seconds = [ring_cost("all_reduce", s, world, alpha_s, 1 / rate) for s in sizes]
        c.curve([(s, 2 * (1 - 1 / world) * s / t / 1e9) for s, t in zip(sizes, seconds, strict=True)], colour, dashed)
    for size, rate in ((m * 2**20, MEASURED[m]) for m in (16, 64, 256, 1024, 16384)):
        c.dot(size, rate, ORANGE)
    c.label(16 * 2**20, MEASURED[16], "32 B200s", dx=10, dy=8)
    c.dot(10e9, 370, BLUE)
    c.dot(58e6, 150, BLUE, "8 H100s: 150", dx=11, dy=6)
    for size, rate in ((2**26, 369), (2**34, 480)):
        c.dot(size, rate, GREEN, f"8 H200s, the switch adds: {rate}", "end" if rate > 400 else "middle", -10, -8)


@picture(222, "Four ranks accumulate four micro-batches each, and send once")
def accumulation(p: Picture) -> None:
    for y, r in spaced(range(RANKS), 50, 34):
        p.words(16, y + 18, f"rank {r}", "soft")
        for x, m in spaced(range(4), 68, 58):
            p.box(x, y, 53, 26, BLUE, f"{4 * r + m}")
        p.box(387, y, 42, 26, GREY, "step")
    p.box(300, 50, 84, 128, ORANGE, "all-reduce")
    p.frame(64, 44, 176, 140)
    p.words(152, 36, "no_sync(): add up only", "soft small", "middle")
    p.words(16, 208, "blue: a micro-batch's forward and backward", "soft")


@picture(298, "Host, compute stream and NCCL's stream in a step: naive and in buckets")
def three_lanes(p: Picture) -> None:
    """Figure 9's step on a GPU: the host launches a layer in 0.3 ms, and the optimizer takes 1 ms."""
    ms, launch, layer_ms = 19.4, 0.3, 1e3 * LAYERS_BACKWARD_S / len(LAYERS)
    cost, done = cost_ms(LAYERS[0]), 1e3 * LAYERS_BACKWARD_S
    naive: list[Bar] = [(done + i * cost, cost, str(len(LAYERS) - 1 - i)) for i in range(len(LAYERS))]
    p.words(16, 22, "lanes: host, compute stream, NCCL's stream; s: step", "soft")
    for top, name, sends in ((48, "naive", naive), (168, "buckets of 1 MB", bucket_sends(LAYERS_BUCKET))):
        sent = sends[-1][0] + sends[-1][1]
        p.words(16, top, f"{name}: {sent + 1:.1f} ms", "ink bold")
        p.bars(top + 8, ms, [(0, (len(LAYERS) + 1) * launch, "launch")], YELLOW)
        launched = (len(LAYERS) + 1) * launch
        p.frame(16 + ms * launched, top + 8, ms * (sent + 1 - launched) - 2, 24, "loss.item() blocks")
        p.bars(top + 36, ms, [(i * layer_ms, layer_ms, str(len(LAYERS) - 1 - i)) for i in range(len(LAYERS))], BLUE)
        p.box(16 + ms * done, top + 36, ms * (sent - done) - 2, 24, GREY, "wait()", hatched=True)
        p.box(16 + ms * sent, top + 36, ms - 2, 24, GREEN, "s")
        p.bars(top + 64, ms, sends, ORANGE)
    p.clock(268, ms, 20)


def steps_to(batch: int) -> int:
    """SGD steps of a linear model, at the best of 32 rates, until the mean loss of 64 runs is 5 % of the first loss.

    It has eight weights, inputs of eight scales, and labels with noise of variance 1. Loss: expected loss minus 1.
    """
    draw, kind = torch.Generator().manual_seed(0), torch.float64
    rates = torch.tensor([0.005 * 2 ** (i / 4) for i in range(32)], dtype=kind).view(1, -1, 1)
    scales = torch.tensor([2 ** (-i / 2) for i in range(8)], dtype=kind)
    offset = torch.ones(64, 32, 8, dtype=kind)  # (runs, rates, weights): the model's weights minus the true weights
    for step in range(1, 1000):
        x = torch.randn(64, batch, 8, generator=draw, dtype=kind) * scales
        error = offset @ x.mT - torch.randn(64, 1, batch, generator=draw, dtype=kind)  # (runs, rates, samples)
        offset = offset - rates * (error @ x) / batch
        loss = ((offset * scales) ** 2).sum(2).mean(0).nan_to_num(math.inf)
        if loss.min() <= 0.05 * (scales**2).sum():
            return step
    raise ValueError(f"no rate reaches the loss with batches of {batch}")


def fitted(steps: dict[int, int]) -> tuple[float, float]:
    """Fit steps = S_min (1 + B_noise / B) by least squares of the logarithms. Return S_min and B_noise."""

    def residual(noise: float) -> tuple[float, float]:
        logs = [math.log(s / (1 + noise / b)) for b, s in steps.items()]
        mean = sum(logs) / len(logs)
        return sum((v - mean) ** 2 for v in logs), math.exp(mean)

    noise = min((1.02**i for i in range(400)), key=residual)
    return residual(noise)[1], noise


@picture(300, "Steps fall and samples rise as the batch passes the critical batch size")
def critical(p: Picture) -> None:
    """Steps and samples to the same loss over batch size: McCandlish et al. 2018, equation 2.11, and our simulation."""
    batches = [10 ** (i / 8) for i in range(-16, 17)]
    c = Chart(p, (0.01, 100), (1, 110))
    ticks = (0.01, 0.1, 1, 10, 100)
    c.axes("batch, in units of the critical batch size", "times the least there could be", ticks, ticks[2:])
    c.curve([(b, 1 + 1 / b) for b in batches], BLUE)
    c.curve([(b, 1 + b) for b in batches], ORANGE, dashed=True)
    c.label(0.03, 34, "steps", "start", 8, -4)
    c.label(30, 31, "samples", "end", -10, -4)
    c.label(1, 7, "both: twice", "middle")
    c.p.line(*c.pixel(1, 6.4), *c.pixel(1, 2.4), arrow=True)
    steps = {b: steps_to(b) for b in (1, 4, 16, 64, 256, 1024)}
    fewest, noise = fitted(steps)
    for batch, count in steps.items():
        c.dot(batch / noise, count / fewest, BLUE)
        c.dot(batch / noise, count * batch / fewest / noise, ORANGE)


def end_s(world: float, tree: bool, alpha_s: float = FLAT_S, messages: float | None = None) -> float:
    """Seconds from the start of backward to the end of the last all-reduce, by equation (5).

    messages: the number of equal buckets, by default the best. A tree goes up and down through 7 ranks of a machine and
    log₂ (W / 8) levels of machines, with 4 and 14 µs per hop by NCCL. Backward or the link sets the end.
    """
    if messages is None:
        return min(end_s(world, tree, alpha_s, n) for n in range(1, 1500))
    backward = 4 * PARAMETERS * TOKENS / world / RANK_FLOPS
    cost = ring_cost("all_reduce", GRADIENTS / messages, round(world), alpha_s, INSIDE.beta)
    if tree:
        cost = 2 * (7 * TREE_S + math.log2(world / 8) * CARD.alpha_s) + 2 * GRADIENTS / messages * INSIDE.beta
    return max(backward / messages + messages * cost, backward + cost)


@picture(330, "Speed over ranks for one global batch: bandwidth alone, trees, flat rings")
def scaling(p: Picture) -> None:
    """The speed-up of W ranks on one global batch."""
    worlds = [round(2 ** (i / 4)) for i in range(20, 49)]
    c = Chart(p, (32, 4096), (32, 4096))
    ticks = (32, 128, 512, 2048)
    c.axes("ranks", "as fast as this many ranks without messages", ticks, ticks)
    one_rank_s = 6 * PARAMETERS * TOKENS / RANK_FLOPS  # forward and backward of the global batch on one rank
    buckets = GRADIENTS / DDP_BUCKET
    looks = (
        ("bandwidth alone", GREY, False, (False, 0.0, 1e5), (4096, "end", 0, -12)),
        ("trees", GREEN, False, (True, FLAT_S, None), (4096, "end", 0, 17)),
        ("trees, 25 MiB", GREEN, True, (True, FLAT_S, buckets), (4096, "end", 0, 20)),
        ("flat rings", ORANGE, False, (False, FLAT_S, None), (4096, "end", 0, 20)),
        ("rings, 25 MiB", ORANGE, True, (False, FLAT_S, buckets), (512, "start", 8, -6)),
    )
    for name, colour, dashed, schedule, (label_x, anchor, dx, dy) in looks:
        speed = {w: one_rank_s / (one_rank_s / w / 3 + end_s(w, *schedule)) for w in (*worlds, label_x)}
        c.curve([(w, speed[w]) for w in worlds if speed[w] >= 32], colour, dashed)
        c.label(label_x, speed[label_x], name, anchor, dx, dy)
        if schedule == (False, FLAT_S, buckets):
            best = max(worlds, key=lambda w: speed[w])
            c.dot(best, speed[best], ORANGE)
