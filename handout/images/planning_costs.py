"""Pictures of costs in planning: batch, tensor messages, errors of predictions, chosen meshes, stages, utilizations."""

from dataclasses import replace

from lab.cluster import steps
from lab.cluster.events import Collective, Compute
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, TODAY, Job, Plan
from lab.cluster.layers import Layers
from lab.cluster.parts import held_by
from lab.cluster.prices import collective_s, compute_s

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Chart, Picture, load, picture, spaced

JOB = Job(MODELS["70b"], 1024, 8192, cluster("dgx-h100", 256))
WAITED = replace(TODAY, overlap_data=False)

# Plans that `planner(job, 1)` finds for 1,024 sequences of 8,192 tokens, by model and devices: with ZeRO's messages
# overlapped, and without overlap (WAITED). None: no plan fits.
CHOSEN: dict[str, dict[int, tuple[Plan, Plan] | None]] = {
    "8b": {
        64: (Plan(64, zero=2), Plan(32, tensor=2, micro_batch=2, zero=1)),
        256: (Plan(256, zero=2), Plan(128, tensor=2, micro_batch=2, zero=1)),
        1024: (Plan(1024, zero=2), Plan(512, tensor=2, micro_batch=2, zero=1)),
        4096: (Plan(1024, tensor=4), Plan(1024, tensor=4, zero=1)),
    },
    "70b": {
        64: (Plan(16, tensor=4, zero=3), Plan(4, 4, 4, 1, 5, "selective", zero=1)),
        256: (Plan(64, 1, 4, 2, 1, "selective", zero=3), Plan(16, 4, 4, 1, 5, "selective", zero=1)),
        1024: (Plan(512, tensor=2, recompute="selective", zero=3), Plan(64, 4, 4, 1, 5, "selective", zero=1)),
        4096: (Plan(256, 2, 8, micro_batch=2, chunks=8, zero=1), Plan(128, 4, 8, chunks=5, zero=1)),
    },
    "405b": {
        64: None,
        256: (Plan(1, 32, 8, recompute="selective"),) * 2,
        1024: (Plan(8, 16, 8, recompute="selective", zero=1),) * 2,
        4096: (Plan(32, 16, 8, 1, 4, "selective", zero=1),) * 2,
    },
}  # fmt: skip


@picture(250, "A layer of 70B in forward on one to sixteen tensor ranks")
def tensor_waits(p: Picture) -> None:
    """Milliseconds of a layer's kernels and messages for 8,192 tokens, by size of the tensor group."""
    p.words(16, 24, "ms of a layer of 70B in forward, 8,192 tokens", "ink bold")
    for y, ranks in spaced((1, 2, 4, 8, 16), 38, 36):
        events = Layers(JOB.model, TODAY, 1, 8192, range(ranks)).forward()
        kernels = 1e3 * sum(compute_s(e, JOB.cluster.device) for e in events if isinstance(e, Compute))
        sent = 1e3 * sum(collective_s(e, JOB.cluster) for e in events if isinstance(e, Collective))
        p.words(16, y + 18, f"T = {ranks}", "ink")
        end = p.stack(70, y, 14, ((kernels, BLUE, f"{kernels:.1f}"), (sent, ORANGE, ""))[:ranks], 26)
        if sent:
            p.words(end + 8, y + 18, f"+ {sent:.1f} ms, {100 * sent / kernels:.0f} %", "soft small")
    p.words(16, 236, "blue: kernels, orange: messages; T = 16 is on two nodes", "soft small")


@picture(352, "Errors of nine forecasts on one H200, of time and of memory")
def forecast(p: Picture) -> None:
    """Predicted / measured - 1. Each row has a blue disc for time and an orange disc for memory."""
    rows = load("results/single.json")["rows"]
    p.words(16, 22, "predicted over measured, less one", "ink bold")
    zero, scale = 264.0, 3.6
    for percent in range(-20, 41, 20):
        x = zero + scale * percent
        p.line(x, 34, x, 308, dashed=percent != 0)
        p.words(x, 326, f"{percent:+d} %" if percent else "0", "soft small", "middle")
    for y, row in spaced(rows, 52, 30):
        suffix = ", recomputed" if row["recomputed"] != "nothing" else ""
        p.words(16, y, row["model"] + suffix, "ink small")
        p.words(16, y + 14, f"{row['micro-batches']} × {int(row['context']):,}", "soft small")
        for kind, colour in (("error of memory", ORANGE), ("error", BLUE)):
            p.disc(zero + scale * float(row[kind].split()[0]), y + 3, colour)
    p.words(16, 345, "blue: time; orange: memory; right of 0: predicted too much", "soft small")


@picture(352, "The fastest mesh and its MFU by model and number of devices, overlapped and waited for")
def chosen(p: Picture) -> None:
    """The planner's fastest mesh and its MFU, by model and devices, with and without overlap of messages."""
    p.words(16, 22, "MFU; data · pipe · tensor, and ZeRO's stage", "ink bold")
    for y, (model, plans) in spaced(CHOSEN.items(), 54, 90):
        p.words(16, y + 46, f"{model.upper()}", "ink")
        for x, (devices, pair) in spaced(plans.items(), 64, 92):
            if y == 54:
                p.words(x + 44, 46, f"{devices:,}", "soft small", "middle")
            if pair is None:
                p.frame(x, y, 88, 80, "nothing fits", "faint")
                continue
            job = Job(MODELS[model], 1024, 8192, cluster("dgx-h100", devices))
            for top, plan, recipe, colour in ((y, pair[0], TODAY, BLUE), (y + 42, pair[1], WAITED, ORANGE)):
                step_s = steps.price(replace(job, recipe=recipe), plan).step_s
                share = steps.model_flops(job) / step_s / devices / job.cluster.device.peak_flops
                p.box(x, top, 88, 40, colour)
                p.words(x + 44, top + 17, f"{share:.0%}", "in", "middle")
                p.words(x + 44, top + 33, f"{plan.data}·{plan.pipe}·{plan.tensor}, Z{plan.zero}", "in small", "middle")
    p.words(16, 340, "across: H100s; blue: overlapped, orange: waited for", "soft small")


@picture(288, "Gigabytes and seconds of four equal stages of 70B")
def unequal_stages(p: Picture) -> None:
    """Memory and seconds of work of four stages with 20 layers in five chunks; norms and product are recomputed."""
    plan = Plan(16, 4, 4, 1, 5, "selective", zero=1)
    priced, layer_bytes = steps.price(JOB, plan), steps.activation_bytes(JOB, plan.tensor, 1, plan.recompute)[1]
    p.words(16, 24, "GB of a device", "ink bold")
    p.words(16, 162, "seconds of a step", "ink bold")
    for y, stage in spaced(range(4), 36, 24):
        # 2(p − 1 − r) + (c − 1) · p + 1 chunks of four layers
        alive = (2 * (3 - stage) + 4 * 4 + 1) * 4 * layer_bytes / 1e9
        state = (6 + 12 / plan.data) * sum(held_by(JOB, plan, stage)) / 1e9
        logits = 10 * JOB.context * JOB.model.vocabulary / plan.tensor / 1e9 if stage == 3 else 0
        p.words(16, y + 14, f"stage {stage}", "soft small")
        parts = ((state, BLUE, f"{state:.0f}"), (alive, GREEN, f"{alive:.0f}"), (logits, ORANGE, ""))
        end = p.stack(70, y, 3.9, parts[: 2 + (stage == 3)], 18)
        p.words(end + 4, y + 14, f"{state + alive + logits:.1f}", "soft small")
        causes = priced.by_rank[stage * plan.tensor]
        idle = causes.get("bubble", 0.0) + causes.get("pipe", 0.0)
        p.words(16, y + 152, f"stage {stage}", "soft small")
        busy = priced.step_s - idle
        end = p.stack(70, y + 138, 11.6, ((busy, YELLOW, f"{busy:.1f}"), (idle, GREY, "")), 18)
        p.words(end + 4, y + 152, f"{idle:.1f}", "soft small")
    p.line(70 + 3.9 * 76, 30, 70 + 3.9 * 76, 132, dashed=True)
    p.words(74 + 3.9 * 76, 146, "76 GB fit", "soft small", "middle")
    p.words(16, 282, "blue: state; green: activations; orange: logits; grey: waits", "soft small")


@picture(196, "One step of 70B as four percentages of a peak")
def utilizations(p: Picture) -> None:
    """Four ways to count the utilization of a step with ZeRO 3 and full recomputation."""
    flops = steps.model_flops(JOB)
    seconds = steps.price(JOB, Plan(256, micro_batch=2, recompute="full", zero=3)).step_s
    causal = flops - 6 * JOB.sequences * JOB.context**2 * JOB.model.width * JOB.model.layers
    recomputed = steps.model_flops(JOB, recompute=True)
    rows = (
        ("MFU, causal scores", causal, 1, BLUE), ("MFU, whole scores", flops, 1, BLUE),
        ("HFU, with recomputation", recomputed, 1, ORANGE), ("MFU of a peak with sparsity", flops, 2, GREEN),
    )  # fmt: skip
    p.words(16, 24, f"one step of {seconds:.1f} s", "ink bold")
    for y, (name, counted, peaks, colour) in spaced(rows, 40, 36):
        share = 100 * counted / seconds / (peaks * JOB.cluster.gpus * JOB.cluster.device.peak_flops)
        p.words(16, y + 16, name, "ink small")
        p.stack(206, y, 2.9, ((share, colour, f"{share:.0f} %"),), 24)


@picture(322, "Steps and tokens of a run over the tokens in a step, at two losses")
def batch(p: Picture) -> None:
    """Tokens over their minimum, 1 + B/B₀, and steps over their minimum, 1 + B₀/B, at losses of 3 and 1.974."""
    c = Chart(p, (0.5, 16), (1, 20))
    c.bottom -= 26
    c.axes("million tokens in a step, B", "times the fewest", (0.5, 1, 2, 4, 8, 16), (1, 2, 5, 10, 20))
    sizes = [0.5 * 2 ** (i / 8) for i in range(41)]
    ours = 1024 * 8192 / 1e6
    for loss, colour, anchor, dx, dy in ((3.0, ORANGE, "end", -10, -6), (1.974, BLUE, "start", 22, 5)):
        critical = 200 / loss ** (1 / 0.21)
        c.curve([(size, 1 + size / critical) for size in sizes], colour)
        c.curve([(size, 1 + critical / size) for size in sizes], colour, dashed=True)
        c.dot(ours, 1 + ours / critical, colour, f"{1 + ours / critical:.1f}×", anchor, dx, dy)
    x, _ = c.pixel(ours, 1)
    p.line(x, c.top, x, c.bottom, dashed=True)
    p.words(16, 311, "full: tokens, dashed: steps; orange: at a loss of 3, blue: at 1.974", "soft small")
