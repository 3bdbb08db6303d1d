"""Pictures of planning's pitfalls: unequal stages, and one step's many utilizations."""

from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, Job, Plan
from lab.cluster.parts import held_by

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Picture, picture, spaced

JOB = Job(MODELS["70b"], 1024, 8192, cluster("dgx-h100", 256))


@picture(288, "Gigabytes and seconds of four equal stages of 70B")
def unequal_stages(p: Picture) -> None:
    """What each of four stages of 20 layers holds, and how long it works in a step, under 1F1B."""
    plan = Plan(16, 4, 4, zero=1)
    played, kept = steps.price(JOB, plan), steps.activation_bytes(JOB, plan.tensor, 1, plan.recompute)[1]
    p.words(16, 24, "GB of a device", "ink bold")
    p.words(16, 162, "seconds of a step", "ink bold")
    for y, stage in spaced(range(4), 36, 24):
        state, alive = (6 + 12 / plan.data) * sum(held_by(JOB, plan, stage)) / 1e9, 20 * (4 - stage) * kept / 1e9
        p.words(16, y + 14, f"stage {stage}", "soft small")
        p.stack(70, y, 3.9, ((state, BLUE, f"{state:.0f}"), (alive, GREEN, f"{alive:.0f}")), 18)
        causes = played.by_rank[stage * plan.tensor]
        idle = causes.get("bubble", 0.0) + causes.get("pipe", 0.0)
        p.words(16, y + 152, f"stage {stage}", "soft small")
        busy = played.step_s - idle
        end = p.stack(70, y + 138, 11.6, ((busy, YELLOW, f"{busy:.1f}"), (idle, GREY, "")), 18)
        p.words(end + 4, y + 152, f"{idle:.1f}", "soft small")
    p.line(70 + 3.9 * 76, 30, 70 + 3.9 * 76, 132, dashed=True)
    p.words(74 + 3.9 * 76, 130, "76 GB fit", "soft small")
    p.words(16, 282, "blue: state; green: activations; yellow: works; grey: waits", "soft small")


@picture(196, "One step of 70B as four percentages of a peak")
def utilizations(p: Picture) -> None:
    """The step of ZeRO 3 with whole layers recomputed, in four ways of counting."""
    flops = steps.model_flops(JOB)
    seconds = steps.price(JOB, Plan(256, micro_batch=2, recompute="full", zero=3)).step_s
    causal = flops - 6 * JOB.sequences * JOB.context**2 * JOB.model.width * JOB.model.layers
    again = steps.model_flops(JOB, recompute=True)
    rows = (
        ("MFU, causal scores", causal, 1, BLUE), ("MFU, whole scores", flops, 1, BLUE),
        ("HFU, with recomputation", again, 1, ORANGE), ("MFU of a peak with sparsity", flops, 2, GREEN),
    )  # fmt: skip
    p.words(16, 24, f"one step of {seconds:.1f} s", "ink bold")
    for y, (name, counted, peaks, colour) in spaced(rows, 40, 36):
        share = 100 * counted / seconds / (peaks * JOB.cluster.gpus * JOB.cluster.device.peak_flops)
        p.words(16, y + 16, name, "ink small")
        p.stack(206, y, 2.9, ((share, colour, f"{share:.0f} %"),), 24)
