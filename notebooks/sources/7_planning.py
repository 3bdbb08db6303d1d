# %% [markdown]
# # 7 · Planning: which mesh for a cluster that you do not have?
# You may use 1,024 GPUs for a month. How should the model be cut? Every wrong try costs thousands of hours of GPU time.
# In this notebook you write a cost model that fits on a page, let it choose a mesh for a model of 70 B parameters, and compare
# it with the kit's simulator.
#
# You write one function of about six lines, `step_s`. Chapter: [Planning](../handout/planning.md).

# %% [markdown]
# ## The facts
# The model is Llama 3 70B. Each step has 512 sequences of 4,096 tokens. A node has eight H100s on NVLink. Between nodes each
# GPU has a card for InfiniBand.
#
# **Predict.** A token costs about 6 FLOPs for each parameter, forward and backward. How long does a step take at least, if
# 1,024 GPUs reach 600 TFLOP/s each?

# %%
P, LAYERS, WIDTH = 70.6e9, 80, 8192
SEQUENCES, CONTEXT, GPUS = 512, 4096, 1024
RATE = 600e12  # FLOP/s that large products reach; the data sheet says 989
NVLINK, INFINIBAND = 360e9, 47e9  # bytes/s from each GPU
ALPHA = 10e-6  # s a message

flops = 6 * P * SEQUENCES * CONTEXT
print(f"{flops:.2g} FLOPs: {flops / GPUS / RATE:.2f} s on {GPUS:,} GPUs, if nobody ever waits")

# %% [markdown]
# This is the floor. No plan can be faster, and the rest of the notebook is about what a plan adds to it.
#
# ## What fits
# A plan has three degrees: data · pipe · tensor = 1,024. Pipe and tensor divide the parameters; data alone does not. A
# parameter takes 18 bytes with AdamW in mixed precision: 2 for itself, 4 for its gradient, 12 for the state. ZeRO-1 shards the
# 12 over data. A GPU has 80 GB. We allow 60, and leave the rest to activations.
#
# **Predict.** Does 70 B fit with tensor = 8 and pipe = 1? With ZeRO-1?

# %%
def held_gb(data, pipe, tensor, zero1=True):
    """Parameters, gradients and state on one GPU."""
    return P / (pipe * tensor) * (6 + 12 / (data if zero1 else 1)) / 1e9

for pipe, tensor in ((1, 1), (1, 8), (2, 8), (4, 8), (8, 8)):
    data = GPUS // (pipe * tensor)
    print(f"data {data:4}, pipe {pipe}, tensor {tensor}: {held_gb(data, pipe, tensor, False):7.1f} GB, "
          f"with ZeRO-1 {held_gb(data, pipe, tensor):6.1f} GB")

# %% [markdown]
# Tensor alone leaves each GPU an eighth of the parameters. At 18 bytes each that is 158.8 GB, twice as much as a GPU has.
# With ZeRO-1 a parameter takes 6 bytes and its share of the 12, one part in 128, so 53.8 GB fit. The last rows show that a
# deeper pipe makes room as well. But room is not free, as the next cells show.
#
# ## What each axis costs
# Three things make a step longer than its arithmetic.
#
# - **Tensor** sends four all-reduces a layer and micro-batch, two forward and two backward, of the activations. Everybody
#   waits for them.
# - **Pipe** leaves a bubble: idle / busy is (pipe − 1) / m, with m micro-batches.
# - **Data** reduces the gradients once a step. We count it whole, as if nothing were hidden.
#
# The cell below has the times of tensor and data. A ring inside a node uses NVLink. A ring across nodes uses the InfiniBand
# card of each of its ranks in a node: one card if one rank is there, and eight, as fast as NVLink, if all are.

# %%
def ring_s(size, ranks, rate):
    """Seconds of an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * (ALPHA + size / ranks / rate)

def rate(ranks, apart):
    """Bytes per second of a ring whose neighbours' numbers differ by `apart`."""
    in_a_node = max(1, 8 // apart)
    return NVLINK if ranks <= in_a_node else min(NVLINK, in_a_node * INFINIBAND)

def parts(data, pipe, tensor):
    """Of one step: seconds of arithmetic, of tensor messages, of data messages, and the micro-batches of a data rank."""
    m = SEQUENCES // data  # one sequence each
    arithmetic = flops / (data * pipe * tensor) / RATE
    activations = 2 * CONTEXT * WIDTH  # bytes, in bfloat16
    messages = m * 4 * LAYERS / pipe * ring_s(activations, tensor, rate(tensor, 1))
    gradients = 4 * P / (pipe * tensor)  # bytes, in float32
    return arithmetic, messages, ring_s(gradients, data, rate(data, pipe * tensor)), m

for plan in ((1024 // 64, 8, 8), (1024 // 16, 2, 8), (1024 // 16, 16, 1)):
    arithmetic, messages, reduction, m = parts(*plan)
    print(f"{plan}: arithmetic {arithmetic:.2f} s, tensor {messages:.2f} s, data {reduction:.2f} s, {m} micro-batches")

# %% [markdown]
# The arithmetic is the same in all three, since each uses all GPUs. The second plan has four times as many data ranks as the
# first. Each of its GPUs holds four times as many parameters, so the reduction takes four times as long. Without tensor
# parallelism (the third plan) no activations travel, but 16 stages share only 8 micro-batches: the bubble will be large.
#
# **Your turn.** Put them together. While a rank is busy it computes and waits for tensor messages. The bubble makes this
# longer, by the factor 1 + (pipe − 1) / m. The gradients come after it. Return the seconds of the step.
#
# Some plans are impossible. A plan with more data ranks than sequences leaves ranks without work, and m would be 0. A plan
# that holds more than 60 GB does not fit. Return `math.inf` for both, so that no search will ever choose them.

# %%
def step_s(data, pipe, tensor):
    """Seconds of a step of this plan; infinitely many if it is impossible."""
    ...

# %%
written = check(
    step_s,
    [((128, 1, 8), sum(parts(128, 1, 8)[:3])), ((16, 8, 8), sum(parts(16, 8, 8)[:2]) * (1 + 7 / 32) + parts(16, 8, 8)[2]),
     ((512, 1, 2), math.inf), ((1024, 2, 8), math.inf)],  # does not fit; twice as many data ranks as sequences
    "First sort out plans that are impossible. Then add arithmetic and tensor messages, multiply by 1 + (pipe − 1) / m, and add the gradients' time.",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def step_s(data, pipe, tensor):
#     """Seconds of a step of this plan; infinitely many if it is impossible."""
#     if data > SEQUENCES or held_gb(data, pipe, tensor) > 60:
#         return math.inf
#     arithmetic, messages, reduction, m = parts(data, pipe, tensor)
#     busy = arithmetic + messages
#     bubble = busy * (pipe - 1) / m
#     return busy + bubble + reduction
# ```
# </details>
#
# The notebook goes on with a function of its own until yours is right.

# %%
def in_one(data, pipe, tensor):
    *busy, reduction, m = parts(data, pipe, tensor)
    possible = m > 0 and held_gb(data, pipe, tensor) <= 60
    return sum(busy) * (m + pipe - 1) / m + reduction if possible else math.inf

price = step_s if written else in_one

# %% [markdown]
# ## The map
# Now try all plans with powers of two.
#
# **Predict.** Where is the fastest: much tensor, much pipe, or little of both? Which corner does not fit?

# %%
from lab.plots.planning import mesh_map

degrees = (1, 2, 4, 8, 16)
speeds = {}
for pipe in degrees:
    for tensor in degrees:
        seconds = price(GPUS // (pipe * tensor), pipe, tensor)
        speeds[pipe, tensor] = flops / seconds / GPUS / 1e12 if seconds < math.inf else None
figure, axes = plt.subplots(figsize=(5.4, 3.2))
mesh_map(axes, speeds, "70B on 1,024 H100s, TFLOP/s a GPU"), axes.grid(False)
plt.show()
best = sorted((speed, key) for key, speed in speeds.items() if speed)[::-1]
for speed, (pipe, tensor) in best[:5]:
    print(f"data {GPUS // (pipe * tensor):3}, pipe {pipe:2}, tensor {tensor:2}: {speed:.0f} TFLOP/s")

# %% [markdown]
# **Figure 1.** Speed by pipe and tensor (your model; hatched: does not fit, or has more data ranks than sequences). Look at the
# top row: with tensor 16 each GPU has half the arithmetic of tensor 8 between its messages, and sends as many bytes in twice
# as many pieces. In the lower left corner the parameters do not fit.
# Just above that corner each GPU reduces the gradients of many parameters. A deep pipe looks nearly free: with fewer data
# ranks, each has more micro-batches, so pipe 16 with tensor 8 has m = 64.
#
# **Change.** Halve `SEQUENCES`: m is halved. Which plan wins now? Then make `INFINIBAND` ten times as fast.
#
# ## What does the page leave out?
# Much: attention, the time of norms, tiles, overlap, activations in memory. The kit's simulator has these. It makes a list of
# events for each stage, prices each event, and plays the lists against each other.
#
# **Predict.** Will it put the five plans above in the same order? Will it call them faster or slower?

# %%
from lab.cluster import steps
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, Job, Plan

def named(played):
    """The causes of a step's time, the largest first."""
    shares = sorted(((s / played.step_s, cause) for cause, s in played.causes.items()), reverse=True)
    return ", ".join(f"{cause} {share:.0%}" for share, cause in shares if share >= 0.01)

job = Job(MODELS["70b"], SEQUENCES, CONTEXT, cluster("dgx-h100", GPUS))
print(f"{'data':>4} {'pipe':>4} {'tensor':>6}   page, s   simulated, s    of it")
for speed, (pipe, tensor) in best[:5]:
    plan = Plan(GPUS // (pipe * tensor), pipe, tensor, 1, 1, "none", 1)
    played = steps.price(job, plan)
    room = "" if steps.fits(job, plan) else "  (activations do not fit)"
    print(f"{plan.data:4} {pipe:4} {tensor:6} {price(plan.data, pipe, tensor):9.2f} {played.step_s:14.2f}    {named(played)}{room}")

# %% [markdown]
# Look at the last row. The page puts it fifth, and the simulator puts it first. The page counts the reduction of gradients
# whole. In the simulator most of it hides behind the backward pass, so many data ranks cost less than the page says. A page of
# arithmetic finds the right corner of the map. It does not find the right plan in that corner.
# [How far to trust the planner](../handout/published.md) compares the simulator with published runs.
#
# ## A step, played
# Four stages and eight micro-batches of an 8 B model, on its wire and on one that is fifty times slower.
#
# **Predict.** What happens to the shape of 1F1B when a message takes about half as long as a forward?

# %%
from dataclasses import replace
from lab.plots.timeline import timelines

small = Job(MODELS["8b"], 8, 4096, cluster("dgx-h100", 32))
slow = replace(small, cluster=small.cluster.faster("links between nodes", 1 / 50))
plan = Plan(1, 4, 8, 1, 1, "full", 0)
wires = {"InfiniBand": small, "a fiftieth": slow}
played = {name: steps.price(j, plan, timeline=True) for name, j in wires.items()}
figure = timelines({name: [*step.timeline.values()] for name, step in played.items()}, width=5.6)
plt.show()
for name, step in played.items():
    print(f"{name:10}  {1e3 * step.step_s:5.0f} ms:", named(step))

# %% [markdown]
# **Figure 2.** One step on both wires (simulated). Look at the gaps between the upper bars: below, forwards and backwards stand
# apart, because each waits for a message. The work is the same.
#
# ## More GPUs for the same batch
# **Predict.** The batch stays 512 sequences. What happens to the speed of each GPU, as their number grows from 256 to 4,096?

# %%
counts, best_speeds = (256, 512, 1024, 2048, 4096), []
for count in counts:
    plans = [
        (price(data, pipe, tensor), (data, pipe, tensor))
        for pipe in degrees for tensor in degrees
        if (data := count // (pipe * tensor))
    ]
    seconds, plan = min(plans)
    best_speeds.append(flops / seconds / count / 1e12)
    print(f"{count:5,} GPUs: {seconds:6.2f} s, data {plan[0]}, pipe {plan[1]}, tensor {plan[2]}, {best_speeds[-1]:.0f} TFLOP/s each")
plt.plot(counts, best_speeds, "o-", color=BLUE)
plt.xscale("log", base=2), plt.xticks(counts, counts), plt.ylim(0, RATE / 1e12)
plt.xlabel("GPUs"), plt.ylabel("TFLOP/s a GPU, best plan")
plt.show()

# %% [markdown]
# **Figure 3.** Strong scaling by your cost model (computed). Look at the fall: arithmetic shrinks with each doubling, and the
# messages and bubbles do not. At 4,096 GPUs each one works at less than half of the speed that it has at 256, so sixteen
# times the GPUs shorten the step only sevenfold. A larger batch would help, up to the point where more tokens a step teach the model no more.
#
# **Next:** a planner over all of this: `lab check mesh.planner`.
