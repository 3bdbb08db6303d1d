# %% [markdown]
# # 7 · Planning: a mesh for a cluster you do not have
# A step is a list of events on each rank. Priced one by one and played against each other, they say what it
# takes. [Planning](../handout/planning.md) tells the constants, and how near that comes to published runs.
# First the third roof, after arithmetic and device memory: the network.

# %%
from lab.plots import planning as draw
from lab.cluster import steps
from lab.cluster.events import Block, Collective
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, Job, Plan, unfit
from lab.cluster.layers import Layers
from lab.cluster.prices import collective_s
from lab.cluster.simulator import closed

llama = MODELS["70b"]
job_of = lambda gpus, sequences: Job(llama, sequences, 4096, cluster("dgx-h100", gpus))
device = cluster("dgx-h100", 8).device
tokens = [2**i for i in range(9, 18)]
shares = {"tensor 1": [], "tensor 8": []}
for name, ranks in (("tensor 1", 1), ("tensor 8", 8)):
    where = cluster("dgx-h100", 64 * ranks)
    for count in tokens:
        layer = Layers(llama, job_of(8, 8).recipe, max(1, count // 4096), min(count, 4096), range(ranks))
        seconds = sum(closed(Block(tuple(layer.forward())), where).values())
        part = 2 * llama.layer_parameters / ranks / 64  # FSDP over 64 data ranks: gathered while it computes
        gathered = collective_s(Collective("all_gather", part, range(0, 64 * ranks, ranks)), where)
        flops = sum(e.flops for e in layer.forward() if hasattr(e, "flops"))
        shares[name].append(flops / max(seconds, gathered) / device.peak_flops)
figure, axes = plt.subplots(figsize=(6.5, 3.2), dpi=70)
picture = draw.roofs(axes, tokens, shares, "a layer of 70B, parameters gathered over 64 data ranks")
figure.tight_layout()
plt.show()
print(picture.table)

# %% [markdown]
# *Two curves that rise and bend. On the left a layer is over before its parameters have come: twice the
# tokens, twice the share. With tensor 1 eight data ranks share a node, and what eight cards bring in NVLink
# passes on. With tensor 8 each rank of the data group has a card of its own and no neighbour: the roof bends
# at eight times the tokens.*
#
# ## A plan
# 70B on 1,024 H100s, a batch of 512 sequences of 4,096 tokens. Your planner tries all meshes.

# %%
from dataclasses import asdict
from tests.mesh import probes_planner as probes

def case(name, gpus, sequences, context, keep=1, where="dgx-h100"):
    return {"model": asdict(MODELS[name]), "cluster": where, "gpus": gpus, "sequences": sequences, "keep": keep,
            "context": context, "recipe": "today", "drawn": False, "seed": "", "room": 1.0}

asked = case("70b", 1024, 512, 4096, keep=3)
answer = ask(probes.planned, [asked], timeout=300)
if answer:
    ((choices, priced),) = answer
    job = probes.job_of(asked)
    for plan, step_s, memory in choices:
        speed = steps.model_flops(job) / step_s / 1024 / 1e12
        print(f"{step_s:.2f} s, {speed:.0f} TFLOP/s, {memory / 1e9:.0f} GB: {Plan(*plan)}")
    print(f"{len(priced)} prices were asked for")
    (saved,) = ask(probes.bound, [asked], timeout=300)
    for resource, share in sorted(saved.items(), key=lambda pair: -pair[1]):
        print(f"twice the {resource}: {100 * share:.1f} % of the step saved")

# %% [markdown]
# ## The map
# For each pipe and tensor the best micro-batch, chunks, recomputation and ZeRO stage. Hatched: nothing fits.

# %%
from dataclasses import replace

job, speeds = job_of(1024, 512), {}
for pipe in (1, 2, 4, 8, 16):
    for tensor in (1, 2, 4, 8, 16):
        if 1024 % (pipe * tensor):
            continue
        plans = [Plan(1024 // pipe // tensor, pipe, tensor, m, chunks, again, zero) for m in (1, 2, 4)
                 for chunks in (1, 4, 5) for again in ("none", "full") for zero in range(4)]
        fitting = [p for p in plans if not unfit(job, p) and steps.fits(job, p)]
        least = None
        for floor, plan in sorted((steps.floor_s(job, p), p) for p in fitting):
            if least is not None and floor > least:
                break
            step_s = steps.price(job, plan).step_s
            least = step_s if least is None else min(least, step_s)
        speeds[pipe, tensor] = least and steps.model_flops(job) / least / 1024 / 1e12
figure, axes = plt.subplots(figsize=(6.5, 3.2), dpi=70)
picture = draw.mesh_map(axes, speeds, "70B on 1,024 H100s, TFLOP/s a device", "TFLOP/s")
figure.tight_layout()
plt.show()
print(picture.table)

# %% [markdown]
# *A grid of numbers, largest where tensor times pipe is 8 or 16, hatched where nothing fits. They fall towards
# large tensor, where each layer waits for its collectives, towards a deep pipe, where too few micro-batches are
# left to fill it, and towards little of both, where it only fits with ZeRO 3 and recomputation.*
#
# ## A step, played
# Four stages, eight micro-batches, on a wire and on one a fiftieth as fast.

# %%
from lab.plots.timeline import timelines

small = Job(MODELS["8b"], 8, 4096, cluster("dgx-h100", 32))
slow = replace(small, cluster=small.cluster.faster("links between nodes", 1 / 50))
plan = Plan(1, 4, 8, 1, 1, "full", 0)
jobs = {"InfiniBand": small, "a fiftieth": slow}
panels = {name: draw.spans(steps.played(job, plan).timeline) for name, job in jobs.items()}
figure, pictures = timelines(panels)
figure.set_dpi(60)
plt.show()
for name, job in jobs.items():
    price = steps.price(job, plan)
    parts = [f"{cause} {100 * seconds / price.step_s:.0f} %" for cause, seconds in price.causes.items()]
    print(f"{name}: {1e3 * price.step_s:.0f} ms;", ", ".join(parts))

# %% [markdown]
# *Two panels of four rows. Each row begins later than the one above and ends earlier, the shape of 1F1B.
# Below, messages are bars long enough to see, and forwards and backwards stand apart.*
#
# ## Strong and weak scaling
# 405B. Strong: 512 sequences of 8,192 tokens on ever more devices. Weak: a sequence for every 8 devices.

# %%
sizes = [1024, 2048, 4096, 8192, 16384]
kinds = {"strong: 512 sequences": lambda gpus: 512, "weak: a sequence for 8": lambda gpus: gpus // 8}
curves = {}
for name, batch in kinds.items():
    cases = [case("405b", gpus, batch(gpus), 8192, where="grand-teton") for gpus in sizes]
    answers = ask(probes.planned, cases, timeout=300)
    if answers:
        curves[name] = []
        for gpus, asked, (((plan, step_s, _),), _) in zip(sizes, cases, answers):
            curves[name].append(steps.model_flops(probes.job_of(asked)) / step_s / gpus / 1e12)
            print(f"{gpus:6,} devices, {batch(gpus):,} sequences: {step_s:6.2f} s, {Plan(*plan)}")
if curves:
    figure, axes = plt.subplots(figsize=(6.5, 3.2), dpi=70)
    picture = draw.scaling(axes, sizes, curves, "405B on H100s")
    figure.tight_layout()
    plt.show()
    print(picture.table)

# %% [markdown]
# *Two lines over the number of devices, which meet at 4,096. Weak scaling is level: this network has no
# congestion, and no device fails. Strong scaling falls as a data rank has fewer micro-batches to fill its
# pipeline. Which batch is worth its tokens is not the planner's question: `ddp.noise_scale` measures that.*
