"""The picture of the front page: one training step, as each chapter changes it. The planner predicts all numbers."""

from dataclasses import dataclass, replace
from functools import cache

from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, TODAY, Job, Plan

from .picture import BLUE, GREEN, GREY, ORANGE, Picture, picture, spaced

GPUS = 16
PLAIN = replace(TODAY, fused_attention=False, sequence=False, overlap_data=False)
FUSED = replace(PLAIN, fused_attention=True)
OVERLAPPED = replace(FUSED, overlap_data=True)
STOPS = (  # name, how it is programmed, plan
    ("Data parallelism, plainly", PLAIN, Plan(GPUS)),
    ("Checkpoint the blocks", PLAIN, Plan(GPUS, recompute="full")),
    ("FlashAttention instead", FUSED, Plan(GPUS)),
    ("Send while backward runs", OVERLAPPED, Plan(GPUS)),
    ("ZeRO-1: shard the state", OVERLAPPED, Plan(GPUS, zero=1)),
    ("ZeRO-3: shard all", OVERLAPPED, Plan(GPUS, zero=3)),
    ("A mesh: tensor=2, ZeRO-1", TODAY, Plan(GPUS // 2, 1, 2, zero=1)),
)
CARD_GB = cluster("dgx-h100", GPUS).device.hbm_bytes / 1e9
TIMES = {"compute": BLUE, "waits": ORANGE, "optimizer": GREEN}
KINDS = {"parameters": BLUE, "gradients": GREEN, "optimizer": ORANGE, "activations and buffers": GREY}


@dataclass(frozen=True)
class Stop:
    """One way to run the step: seconds by cause, and GB per GPU by kind."""

    name: str
    seconds: dict[str, float]
    gb: dict[str, float]


@cache
def stops() -> tuple[Stop, ...]:
    """The stops of Llama 2 7B on 16 H100s, with 64 sequences of 4,096 tokens per step."""
    found = []
    for name, recipe, plan in STOPS:
        job = Job(MODELS["7b"], 64, 4096, cluster("dgx-h100", GPUS), recipe)
        causes, memory = steps.price(job, plan).causes, steps.memory(job, plan)
        compute, optimizer = causes["products"] + causes["memory bandwidth"], causes["optimizer step"]
        seconds = {"compute": compute, "waits": sum(causes.values()) - compute - optimizer, "optimizer": optimizer}
        gb = {kind: memory[kind] / 1e9 for kind in ("parameters", "gradients", "optimizer")}
        gb["activations and buffers"] = (memory["activations"] + memory["buffers"]) / 1e9
        found.append(Stop(name, seconds, gb))
    return tuple(found)


@picture(512, "One training step of a 7B model on 16 GPUs, as each chapter changes it")
def journey(p: Picture) -> None:
    for y, stop in spaced(stops(), 22, 66):
        step_s, total_gb = sum(stop.seconds.values()), sum(stop.gb.values())
        fits = "" if total_gb <= CARD_GB else ", does not fit"
        p.words(16, y, f"{stop.name}: {step_s:.2f} s, {total_gb:.0f} GB{fits}", "ink bold small")
        for top, scale, amounts, colours in ((y + 6, 160, stop.seconds, TIMES), (y + 26, 408 / 215, stop.gb, KINDS)):
            x = 16.0
            for name, colour in colours.items():
                length = amounts[name] * scale
                p.box(x, top, max(length - 1, 0.5), 16, colour, name[0] if length > 13 else "", hatched=colour == GREY)
                x += length
        p.frame(16, y + 26, CARD_GB * 408 / 215, 16)
    p.words(16, 482, "upper: seconds; c: computes, w: waits for messages, o: optimizer", "soft small")
    p.words(16, 502, "lower: GB; p: parameters, g: gradients, o: state, a: activations", "soft small")
