"""Pictures of the page on planning that take prices: memory of a stage, bandwidth of messages, and chosen meshes."""

from lab.cluster import steps
from lab.cluster.costs import sent_bytes
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, RECOMPUTE, Job, Plan
from lab.cluster.prices import group_s

from .picture import BLUE, GREY, ORANGE, Chart, Picture, picture, spaced

# GB/s of an all-reduce over four nodes of eight B200s, by MiB of the payload. Bekman, ml-engineering,
# network/benchmarks/README.md, commit 0cc3de5.
MEASURED = {
    16: 71.80, 32: 142.90, 64: 197.77, 128: 260.50, 256: 283.23, 512: 309.91, 1024: 365.99, 2048: 371.26, 4096: 374.66,
    8192: 376.14, 16384: 376.71,
}  # fmt: skip

# Plans that `planner(job, 1)` finds for 1,024 sequences of 8,192 tokens, by model and devices; None: nothing fits.
CHOSEN: dict[str, dict[int, Plan | None]] = {
    "8b": {
        64: Plan(64, zero=2), 256: Plan(256, zero=2), 1024: Plan(1024, zero=2), 4096: Plan(1024, tensor=4),
    },
    "70b": {
        64: Plan(16, tensor=4, zero=3),
        256: Plan(64, tensor=4, micro_batch=2, recompute="selective", zero=3),
        1024: Plan(512, tensor=2, recompute="selective", zero=3),
        4096: Plan(256, 2, 8, micro_batch=2, chunks=8, zero=1),
    },
    "405b": {
        64: None,
        256: Plan(1, 32, 8, recompute="selective"),
        1024: Plan(8, 16, 8, recompute="selective", zero=1),
        4096: Plan(32, 16, 8, chunks=4, recompute="selective", zero=1),
    },
}  # fmt: skip


@picture(388, "Gigabytes of the fullest stage of 405B by pipe and recomputation")
def stage_memory(p: Picture) -> None:
    """GB of the fullest stage of 405B on 1,024 H100s, by pipe and recomputation: 1F1B, tensor 8, ZeRO 1."""
    job = Job(MODELS["405b"], 512, 8192, cluster("dgx-h100", 1024))
    room = (1 - steps.RESERVED) * job.cluster.device.hbm_bytes / 1e9
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
    p.line(left + scale * room, 32, left + scale * room, 352, dashed=True)
    p.words(left + scale * room + 5, 350, f"{room:.0f} GB fit", "soft small")
    p.words(16, 368, "blue: weights, gradients, state; orange: activations", "soft small")
    p.words(16, 383, "recomputed: none, some (norms, SwiGLU), all", "soft small")


@picture(300, "Bandwidth of an all-reduce over its payload, measured and by our rate")
def payloads(p: Picture) -> None:
    """GB/s of an all-reduce over four nodes of eight B200s: Bekman's measurements, and the kit's rate."""
    where = cluster("hgx-b200", 32)
    c = Chart(p, (14, 18000), (0, 400), log_y=False)
    named = {16: "16 MiB", 64: "64", 256: "256", 1024: "1 GiB", 4096: "4", 16384: "16"}
    c.axes("payload", "GB/s, four nodes of eight B200s", named, range(0, 500, 100))

    def price(mib: float) -> float:
        return sent_bytes("all_reduce", mib * 2**20, 32) / group_s("all_reduce", mib * 2**20, 4, 8, where) / 1e9

    c.curve([(mib, price(mib)) for mib in MEASURED], BLUE, dashed=True)
    c.curve([*MEASURED.items()], ORANGE)
    for value, colour in ((price(256), BLUE), (MEASURED[256], ORANGE)):
        c.dot(256, value, colour)
    c.say(256, price(256), f"our rate: {price(256):.0f}", "end", dx=-10, dy=-8)
    c.say(256, MEASURED[256], f"measured: {MEASURED[256]:.0f}", dx=10, dy=16)


@picture(246, "The fastest mesh and its MFU by model and number of devices")
def chosen(p: Picture) -> None:
    """The planner's fastest mesh and its MFU, for each model and number of devices."""
    p.words(16, 22, "MFU; data · pipe · tensor, and ZeRO's stage", "ink bold")
    for y, (model, plans) in spaced(CHOSEN.items(), 54, 56):
        p.words(16, y + 30, f"{model.upper()}", "ink")
        for x, (devices, plan) in spaced(plans.items(), 64, 92):
            if y == 54:
                p.words(x + 44, 46, f"{devices:,}", "soft small", "middle")
            if plan is None:
                p.frame(x, y, 88, 50, "nothing fits", "faint")
                continue
            job = Job(MODELS[model], 1024, 8192, cluster("dgx-h100", devices))
            share = steps.model_flops(job) / steps.price(job, plan).step_s / devices / job.cluster.device.peak_flops
            p.box(x, y, 88, 50, BLUE if share >= 0.5 else GREY)
            p.words(x + 44, y + 21, f"{share:.0%}", "in", "middle")
            mesh = f"{plan.data}·{plan.pipe}·{plan.tensor}, Z{plan.zero}"
            p.words(x + 44, y + 40, mesh, "in small", "middle")
    p.words(16, 238, "across: H100s; grey: less than half of the peak", "soft small")
