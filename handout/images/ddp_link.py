"""Pictures of schedules that benchmarks/link.py measured on one H200 and its bus to the host."""

import torch

from lab.model.transformer import SIZES, Transformer

from .picture import BLUE, GREEN, GREY, ORANGE, Chart, Picture, load, picture, spaced

MS = {(r["what"], r["size"]): float(r["ms"]) for r in load("results/link.json")["rows"]}
ALPHA_MS = MS["one message", "4,096 B"]  # there and back
with torch.device("meta"):
    BYTES = [2 * w.numel() for w in reversed(list(Transformer(SIZES["xl"]).parameters()))]  # in backward's order
BYTES_PER_MS = 2**27 / (MS["one message", "67,108,864 B"] - ALPHA_MS)


def step_ms(alone_ms: float, limit: float) -> float:
    """Predict a step's milliseconds by equation (5). A bucket is closed at `limit` bytes, goes out, then comes back.

    Forward is a third of `alone_ms`. Backward takes time in proportion to bytes, and none for the embedding.
    """
    *layers, embedding = BYTES
    out = back = passed = filled = 0.0
    for left, size in zip(range(len(layers), -1, -1), (*layers, embedding), strict=True):
        filled, passed = filled + size, passed + (size if left else 0)
        if filled >= limit or not left:
            ready, length = alone_ms * (1 + 2 * passed / sum(layers)) / 3, ALPHA_MS / 2 + filled / BYTES_PER_MS
            out = max(out, ready) + length
            back, filled = max(back, out) + length, 0.0
    return back


@picture(268, "A step on an H200 and its messages over the bus: naive, and in buckets of 64 MB")
def link_trace(p: Picture) -> None:
    steps, px = load("data/link.json"), 408 / 222e3
    for top, (name, words) in spaced((("naive", "naive"), ("64 MB", "buckets of 64 MB")), 24, 114):
        lanes = [steps[name][lane] for lane in ("kernels", "out", "back")]
        last, done = lanes[2][-1][1], lanes[0][-1][1]
        p.words(16, top, f"{words}: {last / 1e3:.0f} ms, {(last - done) / 1e3:.1f} after backward", "ink bold")
        for y, (spans, colour) in spaced(zip(lanes, (BLUE, ORANGE, GREEN), strict=True), top + 32, 29):
            p.busy(y, px, spans, colour, 24, 222e3)
        p.line(16 + px * done, top + 6, 16 + px * done, top + 92, dashed=True)
        for x, y, lane in ((px * done + 24, 27, "kernels"), (18, 56, "to the host"), (18, 85, "back")):
            p.words(x, top + y, lane, "soft small")
    p.times(252, 1e3 * px, range(0, 201, 50), "ms")


@picture(320, "A step over the size of its buckets, measured on an H200 and computed")
def link_buckets(p: Picture) -> None:
    c = Chart(p, (0.25, 4096), (90, 220), log_y=False)
    ticks = (1, 4, 16, 64, 256, 1024)
    c.axes("bucket, MB", "step, ms; dots: measured, dashed: computed", ticks, range(100, 221, 20))
    ms = {what: time for (what, size), time in MS.items() if size == "4,096 tokens"}
    for what in ("nothing sent", "naive"):
        c.curve([(x, ms[what]) for x in c.x], GREY)
        c.label(0.25, ms[what], f"{what}: {ms[what]:.0f}", "start", 6, 17)
    computed = [(2 ** (i / 2), step_ms(ms["nothing sent"], 1e6 * 2 ** (i / 2))) for i in range(-4, 25)]
    c.curve(computed, BLUE, True)
    c.dot(0.25, ms["overlapped"], ORANGE, f"overlapped: {ms['overlapped']:.0f}", "start", 2, -18)
    c.dot(2831, ms["flat"], ORANGE, f"flat: {ms['flat']:.0f}", "end", -10, 3)
    for what in (w for w in ms if w.endswith("MB")):
        c.dot(float(what.split()[0]), ms[what], ORANGE, f"{ms[what]:.0f}", "middle", dy=-12)


@picture(238, "What messages add to a step on an H200, from 2,048 to 16,384 tokens")
def link_tokens(p: Picture) -> None:
    p.words(58, 22, "tokens", "soft", "end")
    p.words(64, 22, "blue: nothing sent; orange: messages add, ms", "soft")
    for top, n in spaced((2048, 4096, 8192, 16384), 34, 50):
        alone = MS["nothing sent", f"{n:,} tokens"]
        p.words(58, top + 26, f"{n:,}", "ink", "end")
        for y, schedule in spaced(("naive", "64 MB"), top, 22):
            total = MS[schedule, f"{n:,} tokens"]
            p.box(64, y, 0.58 * alone - 1, 20, BLUE, f"{alone:.0f}")
            p.box(64 + 0.58 * alone, y, 0.58 * (total - alone), 20, ORANGE)
            p.words(70 + 0.58 * total, y + 15, f"{schedule}: {total - alone:.0f}", "ink small")
