"""Pictures of planning and of published runs. Curves are formulas; predictions come from the benchmark's table."""

from lab.cluster import steps
from lab.cluster.costs import sent_bytes
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, RECOMPUTE, Job, Plan, unfit
from lab.cluster.prices import group_s

from .mesh import simulate
from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Chart, Picture, load, picture, spaced

H100 = cluster("dgx-h100", 16)

# GB/s of an all-reduce over four nodes of eight B200s, by MiB of the payload. Bekman, ml-engineering,
# network/benchmarks/README.md, commit 0cc3de5.
MEASURED = {
    16: 71.80, 32: 142.90, 64: 197.77, 128: 260.50, 256: 283.23, 512: 309.91, 1024: 365.99, 2048: 371.26, 4096: 374.66,
    8192: 376.14, 16384: 376.71,
}  # fmt: skip


@picture(326, "One of eight rings over two nodes of eight devices")
def rings(p: Picture) -> None:
    """One of the eight rings of a group over two nodes: NVLink inside a node, and the ring's own card between nodes."""
    for node, (words, devices, cards, back) in enumerate(((22, 56, 112, 40), (310, 240, 192, 288))):
        p.words(16, words, f"node {node}", "ink bold")
        edge, to_card = (devices, 88) if node == 0 else (devices + 32, 238)
        for x, i in spaced(range(8), 16, 52):
            p.box(x, devices, 40, 32, BLUE, str(i))
            p.box(x, cards, 40, 22, ORANGE if i == 0 else GREY, str(i))
            if i < 7:
                p.line(x + 40, devices + 16, x + 52, devices + 16, arrow=True)
        p.parts.append(f'<path d="M400 {edge} V{back} H36 V{edge}" class="line" marker-end="url(#tip)"/>')
        ends = (to_card, cards) if node == 0 else (cards + 22, devices)
        p.line(28, ends[1], 28, ends[0], arrow=True)
        p.line(44, ends[0], 44, ends[1], arrow=True)
    p.line(28, 192, 28, 136, arrow=True)
    p.line(44, 134, 44, 190, arrow=True)
    inside, cards = H100.inside.bytes_per_s / 1e9, 8 * H100.between.bytes_per_s / 1e9
    p.words(60, 158, f"between nodes: eight rings, eight cards: {cards:.0f} GB/s", "soft")
    p.words(60, 176, "orange: card 0, of ring 0; grey: those of rings 1 to 7", "soft small")
    p.words(424, 310, f"NVLink of a device, all rings: {inside:.0f} GB/s", "soft", "end")


@picture(310, "Milliseconds of a layer's products over its tokens, and of its gather by two links")
def roof(p: Picture) -> None:
    """Forward of a layer of 70B: products at the peak over tokens, and its all-gather on NVLink and on one card."""
    layer, peak = MODELS["70b"].layer_products, H100.device.peak_flops
    c = Chart(p, (1000, 50_000), (1, 100))
    c.axes("tokens", "ms", {1000: "1,000", 3000: "3,000", 10_000: "10,000", 30_000: "30,000"}, (1, 3, 10, 30, 100))
    c.curve([(n, 2e3 * layer * n / peak) for n in (1000, 50_000)], BLUE)
    for link, words, x in ((H100.inside, "gather on NVLink", 6000), (H100.between, "gather on one card", 1000)):
        ms, tokens = 2e3 * layer / link.bytes_per_s, peak / link.bytes_per_s
        c.curve([(1000, ms), (50_000, ms)], ORANGE, dashed=True)
        c.dot(tokens, ms, ORANGE, f"{tokens:,.0f}", dx=6, dy=20)
        c.label(x, ms, f"{words}: {ms:.2g} ms", dx=6, dy=-7)
    c.label(6000, 2e3 * layer * 6000 / peak, "products", "end", dx=-8, dy=-6)


@picture(330, "MFU of 70B over the number of devices, cut in four ways")
def few_tokens(p: Picture) -> None:
    """Predicted MFU over devices, by ZeRO's stage, tensor and pipe. A step has 1,024 sequences of 8,192 tokens."""
    c = Chart(p, (64, 6000), (20, 65), log_y=False)
    c.axes("H100s", "MFU of 70B, %", [2**i for i in range(6, 13)], range(20, 70, 10))

    def mfu(plan: Plan) -> tuple[float, float]:
        devices = plan.data * plan.pipe * plan.tensor
        job = Job(MODELS["70b"], 1024, 8192, cluster("dgx-h100", devices))
        if why := unfit(job, plan) or ("" if steps.fits(job, plan) else "memory"):
            raise ValueError(f"{plan}: {why}")
        rate = steps.model_flops(job) / steps.price(job, plan).step_s / devices
        return devices, 100 * rate / job.cluster.device.peak_flops

    counts = [2**i for i in range(6, 13)]
    kept, light = (1, 1, "none"), (2, 1, "selective")  # micro-batch, chunks, recomputation; we use the faster that fits
    fours = [Plan(n // 4, 1, 4, *(kept if n in (64, 128, 4096) else light), zero=3) for n in counts]
    eights = [Plan(n // 8, 1, 8, *light, zero=2) for n in counts]
    piped = [Plan(n // 16, 2, 8, 2, 8, "none" if n >= 1024 else "selective", zero=1) for n in counts]
    curves = (
        ([Plan(n, recompute="full", zero=3) for n in counts if n <= 1024], BLUE, "ZeRO 3 alone", 16),
        (fours, GREEN, "ZeRO 3, tensor 4", 5),
        (eights, YELLOW, "ZeRO 2, tensor 8", 10),
        (piped, ORANGE, "ZeRO 1, tensor 8, pipe 2", 1),
    )
    for y, (plans, colour, words, dy) in spaced(curves, 176, 24):
        points = [mfu(plan) for plan in plans]
        c.curve(points, colour)
        devices, last = points[-1]
        c.dot(devices, last, colour, f"{last:.0f}", dx=9, dy=dy)
        p.box(84, y - 9, 18, 8, colour)
        p.words(110, y, f"{words}: {last:.0f}", "ink")


@picture(344, "One batch on four stages over time, by three schedules")
def bubble(p: Picture) -> None:
    """Forwards and backwards of a batch by stage, with 4 or 16 micro-batches, and with chunks. Idle time is hatched."""
    for top, (count, chunks, words) in spaced(((4, 1, ""), (16, 1, ""), (4, 2, ", two chunks")), 22, 108):
        run, scale = simulate("interleaved", count, chunks), 76.8 / count
        p.words(16, top, f"{count} micro-batches{words}: idle / busy {run.bubble:.0%}", "ink bold")
        for y, (actions, starts, ends) in spaced(zip(run.ranks, run.starts, run.ends, strict=True), top + 8, 20):
            p.box(16, y, scale * run.length, 17, GREY, hatched=True)
            for action, start, end in zip(actions, starts, ends, strict=True):
                colour = BLUE if action.kind == "forward" else ORANGE
                p.box(16 + scale * start, y, scale * (end - start) - 1, 17, colour)
    p.words(16, 338, "a row a stage; blue: forward, orange: backward, hatched: idle", "soft small")


@picture(320, "Loss over the model's size, for three budgets of compute")
def optimal(p: Picture) -> None:
    """The loss by the fit of Besiroglu et al. 2024, and its minimum, where αA/N^α = βB/D^β."""
    c = Chart(p, (4e9, 1.2e12), (1.85, 2.15), log_y=False)
    c.axes(
        "parameters", "loss", {1e10: "10 B", 3e10: "30 B", 1e11: "100 B", 3e11: "300 B", 1e12: "1 T"}, (1.9, 2.0, 2.1)
    )

    def loss(n: float, flops: float) -> float:
        return 1.817 + 482.01 / n**0.3478 + 2085.43 / (flops / 6 / n) ** 0.3658

    for flops, text, colour in ((5.9e22, "5.9·10²²", ORANGE), (5.9e23, "5.9·10²³", BLUE), (5.9e24, "5.9·10²⁴", GREEN)):
        sizes = [4e9 * 1.05**i for i in range(117)]
        c.curve([(n, loss(n, flops)) for n in sizes if loss(n, flops) < 2.15], colour)
        best = (0.3478 * 482.01 / (0.3658 * 2085.43) * (flops / 6) ** 0.3658) ** (1 / (0.3478 + 0.3658))
        anchor = "middle" if flops > 1e24 else "start"
        c.dot(best, loss(best, flops), colour, f"{text} FLOPs: {best / 1e9:.0f} B", anchor, dy=20)


@picture(340, "Predicted over published TFLOP/s a GPU, twenty-eight runs")
def published(p: Picture) -> None:
    """A dot for each row of the benchmark's table."""
    c = Chart(p, (90, 480), (90, 480))
    ticks = (100, 150, 200, 300, 400)
    c.axes("published, TFLOP/s a GPU", "predicted", ticks, ticks)
    c.curve([(90, 90), (480, 480)], GREY, dashed=True)
    colours = {"Narayanan": BLUE, "Korthikanti": GREEN, "Jiang": YELLOW, "Grattafiori": ORANGE}
    for row in load("results/planner.json")["rows"]:
        c.dot(float(row["published"]), float(row["predicted"]), colours[row["source"].split()[0]])
    c.label(400, 374, "Llama 3, 405B", "end", dx=44, dy=54)
    c.label(100, 260, "on the dashed line:")
    c.label(100, 260, "predicted as published", dy=20)


@picture(314, "Gigabytes on a device over one micro-batch of 70B")
def step_memory(p: Picture) -> None:
    """GB of state, activations and buffers over forward and backward of 80 layers, with five layers per bar."""
    job = Job(MODELS["70b"], 1024, 8192, cluster("dgx-h100", 256))
    kinds = steps.memory(job, Plan(64, 1, 4, micro_batch=2, recompute="selective", zero=3))
    rest, peak, buffers = (gb / 1e9 for gb in (kinds["total"] - kinds["activations"] - kinds["buffers"],
                                               kinds["activations"], kinds["buffers"]))  # fmt: skip
    pair = 6 * (job.model.layer_products + job.model.ends[1]) / 4 / 1e9  # weights and gradients of a layer and the head
    levels = [*range(17), 16, *range(16, -1, -1)]
    bottom, scale = 236.0, 2.6
    p.words(16, 22, "GB", "soft")
    for gb in (0, 20, 40, 60):
        p.words(38, bottom - scale * gb + 5, f"{gb}", "soft small", "end")
        p.parts.append(f'<path d="M44 {bottom - scale * gb:g} H424" class="faint"/>')
    for i, (x, level) in enumerate(spaced(levels, 46, 10.8)):
        parts = ((rest, BLUE), (buffers if i == 17 else pair, ORANGE), (peak * level / 16, GREEN))
        y = bottom
        for gb, colour in parts:
            y -= scale * gb
            p.box(x, y, 9.8, scale * gb, colour)
    p.words(46, bottom + 20, "forward", "soft small")
    p.words(235, bottom + 20, "loss", "soft small", "middle")
    p.words(424, bottom + 20, "backward", "soft small", "end")
    limit_y = bottom - scale * (1 - steps.RESERVED) * H100.device.hbm_bytes / 1e9
    p.line(44, limit_y, 424, limit_y, dashed=True)
    p.words(46, limit_y - 6, "76 GB fit", "soft small")
    p.words(424, limit_y - 6, f"peak {kinds['total'] / 1e9:.1f} GB", "soft small", "end")
    p.words(16, 286, f"blue: {rest:.0f} GB of weights, gradients, state; green: activations;", "soft small")
    p.words(16, 304, "orange: a pair of whole layers, at the loss the logits, too", "soft small")


@picture(408, "Nineteen runs with ZeRO 3: published speeds between two predictions")
def sharded(p: Picture) -> None:
    """Bars from the predicted speed without overlap to that with overlap, and dots at the published speed."""
    rows = load("results/planner_zero3.json")["rows"]
    left, scale = 98.0, 0.53
    for y, row in spaced(rows, 8, 19):
        low, high, speed = (float(row[name]) for name in ("waited for", "hidden", "published"))
        p.words(16, y + 11, f"{row['model']}, {row['GPUs']}", "soft small")
        p.box(left + scale * low, y, scale * (high - low), 14, BLUE if "A100" in row["GPUs"] else GREEN)
        p.disc(left + scale * speed, y + 7, ORANGE)
    for value in (0, 200, 400, 600):
        p.words(left + scale * value, 382, f"{value}", "soft small", "middle")
    p.words(16, 402, "TFLOP/s of a GPU; dot: published, bar: waited for to overlapped", "soft small")


@picture(300, "Gigabytes of weights, gradients and state of 70B by ZeRO's stage, on two meshes")
def zero_memory(p: Picture) -> None:
    """GB of weights, gradients and state of 70B by ZeRO's stage, with data=256, and with data=32, tensor=8."""
    p.words(16, 22, "GB of a device: 70B on 256 H100s", "ink bold")
    left, scale, end = 66.0, 1.6, 362.0
    limit = (1 - steps.RESERVED) * H100.device.hbm_bytes / 1e9
    for top, (data, tensor) in spaced(((256, 1), (32, 8)), 46, 120):
        job = Job(MODELS["70b"], 1024, 8192, cluster("dgx-h100", data * tensor))
        p.words(16, top, f"data={data}" + (f", tensor={tensor}" if tensor > 1 else ""), "ink")
        for y, zero in spaced(range(4), top + 8, 23):
            kinds = steps.memory(job, Plan(data, tensor=tensor, zero=zero))
            p.words(16, y + 15, f"ZeRO {zero}", "soft small")
            x, total = left, 0.0
            for kind, colour in (("parameters", BLUE), ("gradients", ORANGE), ("optimizer", GREEN)):
                total += kinds[kind] / 1e9
                width = min(kinds[kind] / 1e9 * scale, end - x)
                if width > 0:
                    p.box(x, y, width, 19, colour)
                    x += width
            if left + total * scale > end:
                p.words(end + 6, y + 15, "…", "ink")
            p.words(424, y + 15, f"{total:,.0f}", "ink small", "end")
    p.line(left + scale * limit, 34, left + scale * limit, 266, dashed=True)
    p.words(left + scale * limit + 5, 264, f"{limit:.0f} GB fit", "soft small")
    p.words(16, 288, "blue: weights, orange: gradients, green: state; …: goes on", "soft small")


@picture(388, "Gigabytes of the fullest stage of 405B by pipe and recomputation")
def stage_memory(p: Picture) -> None:
    """GB of the fullest stage of 405B on 1,024 H100s, by pipe and recomputation, with 1F1B, tensor 8 and ZeRO 1."""
    job = Job(MODELS["405b"], 512, 8192, cluster("dgx-h100", 1024))
    limit = (1 - steps.RESERVED) * job.cluster.device.hbm_bytes / 1e9
    p.words(16, 22, "GB of the fullest stage, 405B on 1,024 devices", "ink bold")
    left, scale = 122.0, 1.86
    for top, pipe in spaced((4, 8, 16, 32), 36, 80):
        p.words(16, top + 38, f"pipe {pipe}", "ink")
        for y, (recompute, words) in spaced(zip(RECOMPUTE, ("none", "some", "all"), strict=True), top, 24):
            kinds = steps.memory(job, Plan(1024 // 8 // pipe, pipe, 8, recompute=recompute, zero=1))
            state = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer")) / 1e9
            live = kinds["activations"] / 1e9
            p.words(left - 6, y + 15, words, "soft small", "end")
            p.stack(left, y, scale, ((state, BLUE, ""), (live, ORANGE, "")), 20, gap=0)
            p.words(424, y + 15, f"{state + live:.0f}", "ink small", "end")
    p.line(left + scale * limit, 32, left + scale * limit, 352, dashed=True)
    p.words(left + scale * limit + 5, 350, f"{limit:.0f} GB fit", "soft small")
    p.words(16, 368, "blue: weights, gradients, state; orange: activations", "soft small")
    p.words(16, 383, "recomputed: none, some (norms, SwiGLU), all", "soft small")


@picture(300, "Bandwidth of an all-reduce over its payload, measured and by our rate")
def payloads(p: Picture) -> None:
    """GB/s of an all-reduce over four nodes of eight B200s: Bekman's measurements, and the kit's rate."""
    b200s = cluster("hgx-b200", 32)
    c = Chart(p, (14, 18000), (0, 400), log_y=False)
    named = {16: "16 MiB", 64: "64", 256: "256", 1024: "1 GiB", 4096: "4", 16384: "16"}
    c.axes("payload", "GB/s, four nodes of eight B200s", named, range(0, 500, 100))

    def price(mib: float) -> float:
        return sent_bytes("all_reduce", mib * 2**20, 32) / group_s("all_reduce", mib * 2**20, 4, 8, b200s) / 1e9

    c.curve([(mib, price(mib)) for mib in MEASURED], BLUE, dashed=True)
    c.curve([*MEASURED.items()], ORANGE)
    for value, colour in ((price(256), BLUE), (MEASURED[256], ORANGE)):
        c.dot(256, value, colour)
    c.label(256, price(256), f"our rate: {price(256):.0f}", "end", dx=-10, dy=-8)
    c.label(256, MEASURED[256], f"measured: {MEASURED[256]:.0f}", dx=10, dy=16)
