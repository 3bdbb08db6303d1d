# %% [markdown]
# # 1 · Benchmarking: what a clock sees
# A simulated GPU takes a known time for each step. Its first calls are slow, as if they compiled. We ask three
# timers what a step takes: yours, one that never waits, and one that counts the warm-up.

# %%
from tests.benchmarking import probes

import random
draw = random.Random(0)
warmup, steps = 3, 40
device_s = [0.2, 0.08, 0.03] + [draw.gauss(0.010, 0.0006) for _ in range(steps)]
nothing = [0.0] * len(device_s)
yours = ask(probes.timed_steps, nothing, device_s, nothing, warmup, steps, device="simulated")
cold = ask(probes.timed_steps, nothing, device_s, nothing, 0, warmup + steps, device="simulated")

# %%
from lab.measure.device import SimulatedGPU
import time

with SimulatedGPU() as gpu:  # a timer that never waits, written out
    hasty = []
    for seconds in device_s[warmup:]:
        start = time.perf_counter()
        gpu.launch(seconds)
        hasty.append(time.perf_counter() - start)
print(f"without synchronize: a step seems to take {1e6 * sum(hasty) / steps:.1f} µs")
if yours:
    print(f"yours:               {1e3 * yours['median']:.2f} ms (median of {steps})")
    print(f"warm-up counted in:  {1e3 * cold['mean']:.2f} ms (mean), {1e3 * cold['median']:.2f} ms (median)")

# %%
if yours:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3))
    left.hist([1e3 * s for s in yours["samples"]], bins=12, color=BLUE, hatch="//", edgecolor="white")
    left.set(title="warmed up, synchronized", xlabel="ms", ylabel="steps")
    middle.hist([1e6 * s for s in hasty], bins=12, range=(0, 12), color=GREEN, hatch="..", edgecolor="white")
    middle.set(title="never synchronized", xlabel="µs", ylabel="steps")
    slow = [10 ** (0.7 + i / 8) for i in range(15)]  # ms
    right.hist([1e3 * s for s in cold["samples"]], bins=slow, color=ORANGE, hatch="xx", edgecolor="white")
    right.set(title="warm-up counted in", xlabel="ms", ylabel="steps", xscale="log")
    figure.tight_layout()
    plt.show()

# %% [markdown]
# *Three histograms. Left, samples lie around 10 ms. In the middle, all lie at 5 µs: the time to ask, not the time it takes.
# Right, most lie at 10 ms and three far to the right of them, at 30, 80 and 200.*
#
# | timer | what it says of a 10 ms step |
# |---|---|
# | never waits | 5 µs: the time to ask |
# | counts the warm-up, mean | 17 ms |
# | waits, warmed up | 10 ms |

# %% [markdown]
# ## The roofline, with a model's layers on it
# Each layer of a transformer of GPT-2's size, forward, at batch 8 and context 1,024 in bfloat16, on an A100's roof.
# Left of the ridge memory binds; right of it arithmetic does.

# %%
from dataclasses import asdict
from lab.model.transformer import SIZES
from tests.benchmarking import probes_counting

peaks = (312e12, 2.039e12)
bounds = ask(probes_counting.roofline, asdict(SIZES["small"]), 8, 1024, "bfloat16", peaks)
if bounds:
    print(f"{'layer':10}  FLOPs a byte  at least, µs  bound by")
    for name, (flops, bytes, intensity, seconds, by) in bounds.items():
        if name.endswith(" forward"):
            print(f"{name.split()[0]:10}  {intensity:12.0f}  {1e6 * seconds:12.0f}  {by}")

# %%
if bounds:
    ridge, figure = peaks[0] / peaks[1], plt.figure(figsize=(7, 4))
    axes = figure.add_subplot()
    axes.plot([8, ridge, 2000], [8 * peaks[1] / 1e12, 312, 312], color="black")
    axes.annotate(f"ridge: {ridge:.0f}", (ridge, 312), textcoords="offset points", xytext=(-60, 4))
    marks = {"compute": ("o", BLUE), "memory": ("s", ORANGE)}
    below = {"scores": (8, -12), "q_proj": (-16, -18), "gate_proj": (-16, -32), "down_proj": (-16, -46), "head": (4, -18)}
    for name, (flops, bytes, intensity, seconds, by) in bounds.items():
        layer, direction = name.split()
        if direction == "forward" and layer in below:
            mark, colour = marks[by]
            axes.plot(intensity, flops / seconds / 1e12, mark, color=colour, markersize=8)
            place = (intensity, flops / seconds / 1e12)
            axes.annotate(layer, place, textcoords="offset points", xytext=below[layer])
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s, at most", ylim=(10, 700))
    plt.show()

# %% [markdown]
# *A line that rises to the ridge at 153 FLOPs a byte and is flat from there. The scores of attention, a square, are far
# left of the ridge, at 28: they can reach a fifth of the peak. All linear layers, circles, are on the flat part.* The
# table above has the numbers. k_proj, v_proj and o_proj lie on q_proj here, up_proj on gate_proj, values on scores.
