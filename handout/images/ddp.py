"""Pictures of the chapter on data parallelism. Timelines follow the cost model, without noise."""

import math

import torch

from lab.cluster.costs import ring_cost
from reference.ddp.accounting import Link, accounting

from .picture import BLUE, COLOURS, GREEN, GREY, ORANGE, YELLOW, Bar, Chart, Lane, Picture, picture, spaced

RANKS = 4
LINK = Link(alpha_s=100e-6, bytes_per_s=1e9)
LAYERS = (500_000,) * 8  # the worked example: bytes of each gradient
LAYERS_BACKWARD_S, LAYERS_BUCKET = 8e-3, 1_000_000


@picture(268, "One step of data parallelism on four ranks")
def replicas(p: Picture) -> None:
    for x, r in spaced(range(RANKS), 16, 104):
        p.words(x + 47, 26, f"rank {r}", "ink bold", "middle")
        for y, words, colour in ((40, "weights w", GREY), (78, f"share {r}", YELLOW), (116, "backward", BLUE)):
            p.box(x, y, 94, 30, colour, words)
        p.line(x + 47, 148, x + 47, 164, arrow=True)
        p.words(x + 54, 163, f"g{chr(0x2080 + r)}", "soft small")
        p.line(x + 47, 202, x + 47, 218, arrow=True)
        p.box(x, 222, 94, 30, GREY, "w − lr · ḡ")
    p.box(16, 168, 406, 32, ORANGE, "all-reduce: ḡ = (g₀ + g₁ + g₂ + g₃) / 4")


@picture(312, "Broadcast by a tree: eight ranks have the tensor after three rounds")
def tree(p: Picture) -> None:
    """A binomial broadcast over eight ranks. The number of ranks with the tensor doubles in each round."""
    world = 8
    for x, r in spaced(range(world), 78, 47):
        p.words(x, 26, str(r), "ink bold", "middle")
    p.words(12, 26, "rank", "soft")
    for y, reach in spaced((1, 2, 4, 8), 36, 72):
        for x, r in spaced(range(world), 60, 47):
            p.box(x, y, 36, 26, BLUE if r < reach else None)
        if reach < world:
            p.words(12, y + 54, f"round {reach.bit_length()}", "soft small")
            for x, _ in spaced(range(reach), 78, 47):
                p.line(x, y + 28, x + 47 * reach, y + 68, arrow=True)
    p.words(12, 300, "blue: has the tensor", "soft")


def ring_states(world: int = RANKS) -> list[tuple[list[list[int]], list[tuple[int, int]]]]:
    """The states of a ring all-reduce: each rank's numbers, and the (rank, chunk) pairs that just arrived."""
    numbers = [[(c + 1) * 10**r for c in range(world)] for r in range(world)]
    states = [([row[:] for row in numbers], list[tuple[int, int]]())]
    for step in range(2 * (world - 1)):
        sent = [numbers[r][(r - step) % world] for r in range(world)]
        received = []
        for r in range(world):
            chunk = (r - step - 1) % world
            numbers[r][chunk] = sent[r - 1] + (numbers[r][chunk] if step < world - 1 else 0)
            received.append((r, chunk))
        states.append(([row[:] for row in numbers], received))
    return states


@picture(566, "Ring all-reduce of four numbers on four ranks, step by step")
def ring(p: Picture) -> None:
    names = ["at the start", *(f"reduce, step {s}" for s in range(3)), *(f"gather, step {s}" for s in range(3))]
    for i, (name, (numbers, received)) in enumerate(zip(names, ring_states(), strict=True)):
        left, top = 16 + 212 * (i % 2), 16 + 140 * (i // 2)
        p.words(left, top + 12, name, "ink bold")
        for r, row in enumerate(numbers):
            p.words(left, top + 38 + 26 * r, f"{r}", "soft small")
            for c, number in enumerate(row):
                complete = number == (c + 1) * 1111
                colour = ORANGE if (r, c) in received else BLUE if complete else GREY
                p.box(left + 14 + 46 * c, top + 21 + 26 * r, 42, 23, colour, str(number))
    for y, colour, text in ((462, ORANGE, "has just changed"), (494, BLUE, "whole sum"), (526, GREY, "not yet whole")):
        p.box(232, y, 24, 22, colour)
        p.words(264, y + 16, text, "soft")


@picture(432, "Five collectives: which parts four ranks have before and after")
def collectives(p: Picture) -> None:
    """The parts of each rank before and after the five collectives: number and colour, by (rank, column)."""
    ranks = range(RANKS)
    full = {(r, c): (c, COLOURS[r]) for r in ranks for c in ranks}  # each rank has four different parts
    parts = {(r, r): (r, COLOURS[r]) for r in ranks}
    looks = (
        ("broadcast", {k: v for k, v in full.items() if k[0] == 0}, {(r, c): (c, BLUE) for r in ranks for c in ranks}),
        ("all-gather", parts, {(r, c): (c, COLOURS[c]) for r in ranks for c in ranks}),
        ("reduce-scatter", full, {(r, r): (r, GREY) for r in ranks}),
        ("all-reduce", full, {(r, c): (c, GREY) for r in ranks for c in ranks}),
        ("all-to-all", full, {(r, c): (r, COLOURS[c]) for r in ranks for c in ranks}),
    )
    for i, (name, before, after) in enumerate(looks):
        left, top = 16 + 214 * (i % 2), 14 + 140 * (i // 2)
        p.words(left, top + 12, name, "ink bold")
        for shift, cells in ((0, before), (110, after)):
            for r in ranks:
                for c in ranks:
                    x, y = left + shift + 21 * c, top + 22 + 25 * r
                    number, colour = cells.get((r, c), ("", None))
                    p.box(x, y, 19, 23, colour, str(number))
        p.line(left + 87, top + 71, left + 106, top + 71, arrow=True)
    p.words(230, 308, "rows: ranks 0 to 3", "soft")
    p.words(230, 328, "numbers: parts", "soft")
    p.words(230, 348, "colours: where a part is from", "soft")
    for r in ranks:
        p.box(230 + 48 * r, 358, 42, 22, COLOURS[r], f"rank {r}")
    p.box(230, 386, 42, 22, GREY, "sum")


def cost_ms(size: float, link: Link = LINK) -> float:
    return 1e3 * ring_cost("all_reduce", size, RANKS, link.alpha_s, 1 / link.bytes_per_s)


@picture(300, "One step with two gradients of 1 MB on a link: naive, flat and overlapped")
def overlap(p: Picture) -> None:
    one, two = cost_ms(1e6), cost_ms(2e6)
    ms, backward = 38.0, [(0.0, 3.0, "backward of 2"), (3.0, 3.0, "of 1")]
    p.words(16, 22, "upper lane: computes; lower lane: sends", "soft")
    p.lanes(48, "naive", ms, backward, [(6, one, "g₂"), (6 + one, one, "g₁")])
    p.lanes(126, "flat", ms, backward, [(6, two, "g₂ and g₁")])
    p.lanes(204, "overlapped", ms, backward, [(3, one, "g₂"), (6, one, "g₁")])
    p.clock(272, ms, 10)


def bucket_sends(limit: int, link: Link = LINK) -> list[Bar]:
    """The bars of the worked example's bucket messages: start and length in ms, and the layers in the bucket."""
    sends, free, passed, size, first = list[Bar](), 0.0, 0, 0, len(LAYERS) - 1
    for layer in reversed(range(len(LAYERS))):
        passed, size = passed + LAYERS[layer], size + LAYERS[layer]
        if layer == 0 or size + LAYERS[layer - 1] > limit:
            start = max(free, 1e3 * LAYERS_BACKWARD_S * passed / sum(LAYERS))
            free = start + cost_ms(size, link)
            sends.append((start, free - start, f"{layer}" if first == layer else f"{first}–{layer}"))
            size, first = 0, layer - 1
    return sends


@picture(300, "Eight gradients of 0.5 MB: one message each, in buckets of 1 MB, and flat")
def buckets(p: Picture) -> None:
    ms = 26.0
    layer_ms = 1e3 * LAYERS_BACKWARD_S / len(LAYERS)
    backward = [(i * layer_ms, layer_ms, str(len(LAYERS) - 1 - i)) for i in range(len(LAYERS))]
    p.words(16, 22, "upper lane: backward, 7 … 0; lower lane: messages", "soft")
    p.lanes(48, "a message for each", ms, backward, bucket_sends(1))
    p.lanes(126, "buckets of 1 MB", ms, backward, bucket_sends(LAYERS_BUCKET))
    p.lanes(204, "flat", ms, backward, bucket_sends(sum(LAYERS)))
    p.clock(272, ms, 14)


@picture(300, "The time of a step over the size of its buckets, at three latencies")
def bucket_size(p: Picture) -> None:
    """A step's time over bucket size, for 48 MB in 240 equal gradients on a link that takes longer than backward."""
    sizes, backward_s = [200_000] * 240, 100e-3
    limits = [n * 200_000 for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60, 80, 120, 240)]
    c = Chart(p, (0.2, 48), (120, 800))
    c.axes("bucket, MB", "step, ms", (0.2, 1, 4, 16, 48), (200, 300, 400, 600))
    for colour, alpha_s, dashed in ((BLUE, 10e-6, False), (GREEN, 100e-6, True), (ORANGE, 400e-6, False)):
        link = Link(alpha_s, 5e8)
        steps = [
            1e3 * accounting(sizes, RANKS, link, variant="bucketed", backward_s=backward_s, bucket_bytes=b).step_s
            for b in limits
        ]
        c.curve([(b / 1e6, ms) for b, ms in zip(limits, steps, strict=True)], colour, dashed)
        best, dy = steps.index(min(steps)), -12 if alpha_s > 1e-4 else 22
        c.dot(limits[best] / 1e6, steps[best], colour, f"α = {1e6 * alpha_s:.0f} µs", "middle", dy=dy)


@picture(226, "A bucket's flat tensor, and the gradients that are views of it")
def views(p: Picture) -> None:
    """A bucket: one flat tensor, gradients that are views of it, and one missing gradient."""
    p.words(16, 26, "bucket 1: one flat tensor, one all-reduce", "ink bold")
    gradients = ((16, 130, "layer4.weight"), (146, 60, "4.bias"), (206, 130, "layer3.weight"), (336, 60, "3.bias"))
    for x, w, name in gradients:
        missing = name == "layer3.weight"
        p.box(x, 40, w - 3, 40, GREY if missing else GREEN, "zeros" if missing else "grad")
        p.line(x + w / 2, 116, x + w / 2, 84, arrow=not missing, dashed=missing)
        p.words(x + w / 2, 134, name, "ink small", "middle")
        p.words(x + w / 2, 152, ".grad None" if missing else ".grad", "soft small", "middle")
    p.words(16, 186, "Gradients lie in the flat tensor: nothing is copied back.", "soft")
    p.words(16, 208, "layer3.weight had no gradient: zeros travel.", "soft")


@picture(300, "Two ranks whose hooks fire in different orders: sent as they fire, and by index")
def order(p: Picture) -> None:
    """All-reduces carry no names. Hooks of two ranks fire in different orders; gradients leave so, or by index."""
    fired, colours = (("g₂", "g₁"), ("g₁", "g₂")), {"g₂": BLUE, "g₁": ORANGE}
    for top, title, by_index in ((24, "sent as hooks fire", False), (168, "sent in one order: g₂, then g₁", True)):
        p.words(16, top, title, "ink bold")
        for x, text in ((78, "hooks fire"), (168, "all-reduce 1"), (304, "all-reduce 2")):
            p.words(x, top + 22, text, "soft small")
        sent = [sorted(names, reverse=True) if by_index else names for names in fired]
        for r, (y, names) in enumerate(spaced(fired, top + 30, 32)):
            p.words(16, y + 18, f"rank {r}", "soft")
            p.words(78, y + 18, ", ".join(names), "ink")
            for x, name in spaced(sent[r], 168, 136):
                p.box(x, y, 128, 26, colours[name], name)
        p.words(16, top + 112, "sum", "soft")
        for x, summands in spaced(zip(*sent, strict=True), 168, 136):
            same = len(set(summands)) == 1
            text = f"{' + '.join(summands)}: {'right' if same else 'wrong'}"
            p.box(x, top + 94, 128, 26, GREEN if same else GREY, text, hatched=not same)


@picture(200, "Pieces of norm 3 and 4 are a gradient of norm 5")
def norm(p: Picture) -> None:
    """A gradient in two pieces. Squared norms add up, norms do not."""
    p.line(40, 160, 40 + 30 * 4, 160, arrow=True)
    p.line(160, 160, 160, 160 - 30 * 3, arrow=True)
    p.line(40, 160, 158, 72, arrow=True)
    p.words(100, 180, "rank 1: 4", "ink", "middle")
    p.words(168, 120, "rank 0: 3", "ink")
    p.words(86, 100, "5", "ink bold", "end")
    p.words(250, 66, "all-reduce 3² + 4² = 25", "ink small")
    p.words(250, 88, "norm = √25 = 5", "ink small")
    p.words(250, 122, "not 3 + 4 = 7", "soft small")
    p.words(250, 144, "not (3 + 4) / 2 = 3.5", "soft small")


@picture(222, "A hook that waits, and a hook that starts: eight gradients of 0.5 MB")
def hook_waits(p: Picture) -> None:
    """Figure 9's first case, without and with `wait()` in the hook. With it, backward stops during each message."""
    ms, layer_ms, cost = 20.5, 1e3 * LAYERS_BACKWARD_S / len(LAYERS), cost_ms(LAYERS[0])
    p.words(16, 22, "upper lane: backward, 7 … 0; lower lane: messages", "soft")
    for top, name, step in ((48, "the hook waits", layer_ms + cost), (126, "the hook starts", layer_ms)):
        computed = [(i * step, layer_ms, str(len(LAYERS) - 1 - i)) for i in range(len(LAYERS))]
        sent = Lane()
        for start, length, gradient in computed:
            sent.add(start + length, cost, gradient)
        p.lanes(top, name, ms, computed, sent)
    p.clock(194, ms, 18)


def drifting(averaged: tuple[bool, bool, bool], broadcast: bool = True) -> tuple[list[float], float]:
    """Train four replicas on the product of two numbers by SGD. Return their distance after each step, and final loss.

    averaged: whether gradients of the first weight, the bias and the second weight are averaged.
    """
    draw, kind = torch.Generator().manual_seed(0), torch.float64
    shapes = ((8, 32), (1, 32), (32, 1))
    w = [torch.randn(RANKS, *s, generator=draw, dtype=kind) / s[0] ** 0.5 for s in shapes]
    w = [p[:1].expand_as(p) if broadcast else p for p in w]
    distances, losses = [], []
    for _ in range(1000):
        x = torch.randn(RANKS, 8, 8, generator=draw, dtype=kind)  # (ranks, samples of a rank, numbers)
        w = [p.detach().requires_grad_() for p in w]
        loss = ((torch.tanh(x @ w[0] + w[1]) @ w[2] - x[..., :1] * x[..., 1:2]) ** 2).mean((1, 2))  # (ranks)
        gradients = torch.autograd.grad(loss.sum(), w)
        w = [p - 0.1 * (g.mean(0) if mean else g) for p, g, mean in zip(w, gradients, averaged, strict=True)]
        distances.append(max(math.hypot(*((p[r] - p[0]).detach().norm() for p in w)) for r in range(RANKS)))
        losses.append(loss.mean().item())
    return distances, sum(losses[-100:]) / 100


@picture(300, "Replicas that drift apart, though the loss falls")
def unequal(p: Picture) -> None:
    c = Chart(p, (1, 1000), (0.05, 20))
    c.axes("step", "largest distance between two replicas' weights", (1, 10, 100, 1000), (0.1, 1, 10))
    _, right = drifting((True, True, True))
    looks = (
        ("weights not broadcast", ORANGE, True, (True, True, True), False, -12),
        ("bias not averaged", BLUE, False, (True, False, True), True, -20),
    )
    for name, colour, dashed, averaged, broadcast, dy in looks:
        distances, loss = drifting(averaged, broadcast)
        c.curve(list(enumerate(distances, 1)), colour, dashed)
        c.label(1000, distances[-1], f"{name}: loss {loss:.3f}", "end", 0, dy)
    c.label(1000, 0.05, f"right: distance 0, loss {right:.3f}", "end", 0, -8)
