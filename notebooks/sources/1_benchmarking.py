# %% [markdown]
# # 1 · Benchmarking: why does the clock say five microseconds?
# You time a step on a GPU, and it takes 5 µs. You make the model twice as large, and it takes 5 µs again. Nothing is wrong
# with the clock. In this notebook you build the queue that fools it, then a timer that is not fooled. At the end you
# ask how fast a layer could be at best.
#
# You write one function of about ten lines, `timed`. Chapter: [Benchmarking](../handout/benchmarking.md).

# %% [markdown]
# ## A device that works behind your back
# A GPU is asynchronous. The host (your Python program) puts work into a queue and goes on at once. The device takes one piece
# after the other. Here is all of that in a few lines. Time is a number, so nothing depends on this machine.

# %%
class Device:
    """A queue: `now` is the host's time, `free` is when the device has done all that was asked of it."""

    def __init__(self, ask_s=5e-6):
        self.now = self.free = 0.0
        self.ask_s = ask_s

    def launch(self, seconds):
        self.now += self.ask_s  # asking costs the host a little
        self.free = max(self.free, self.now) + seconds  # the work starts when the device is free

    def synchronize(self):
        self.now = max(self.now, self.free)  # the host waits

    def clock(self):
        return self.now

# %% [markdown]
# **Predict.** A step of 10 ms is launched. What does a clock show that is read before and after? What does it show if the
# host synchronizes before the second reading?

# %%
for wait in (False, True):
    device = Device()
    start = device.clock()
    device.launch(0.010)
    if wait:
        device.synchronize()
    print(f"synchronize {wait!s:5}: {1e3 * (device.clock() - start):.3f} ms")

# %% [markdown]
# Without waiting, the clock sees the time to *ask*. It is 5 µs whatever the work is. That is why a model twice as large
# seemed to cost nothing. With waiting, the clock shows 10.005 ms: 5 µs to ask, then 10 ms of work. `torch.cuda.synchronize()` is the waiting; reading a value, as `loss.item()` does, waits too.
#
# ## The first sample has a past
# Waiting afterwards is not enough. Before you measure, warm-up steps have run, and the device may still be busy with them.
#
# **Predict.** Three warm-up steps of 10 ms are launched, and then one step is timed, with a synchronize after it. What does
# the clock show?

# %%
device = Device()
for _ in range(3):
    device.launch(0.010)
start = device.clock()
device.launch(0.010)
device.synchronize()
print(f"{1e3 * (device.clock() - start):.3f} ms for a step of 10 ms")

# %% [markdown]
# The clock shows four steps, not one: the device first had to finish the warm-up. The 10 µs that are missing from 40 ms
# passed before the first reading. The device was already at work then, while the host launched two more steps.
#
# **Your turn.** Write a timer that gets both ends right. `step` is a function
# that launches some work, and `device` is as above. Run the warm-up, then return a list of seconds, one for each of the steps.

# %%
def timed(device, step, warmup, steps):
    """Seconds that each of `steps` calls of step() takes on the device, after `warmup` calls that do not count."""
    ...

# %%
class Job:
    """A step that launches 200, 80, 30 and then 10 ms, as if its first calls compiled."""

    def __init__(self):
        self.device, self.calls = Device(), 0

    def __call__(self):
        self.device.launch((0.2, 0.08, 0.03, 0.01)[min(self.calls, 3)])
        self.calls += 1

    def __repr__(self):
        return "job"

def on_a_job(warmup, steps):
    job = Job()
    return timed(job.device, job, warmup, steps)

on_a_job.__name__ = "timed"
ASK = 5e-6
written = check(
    on_a_job,
    [((0, 1), [0.2 + ASK]), ((3, 2), [0.01 + ASK, 0.01 + ASK]), ((2, 2), [0.03 + ASK, 0.01 + ASK])],
    "Wait for the device after the warm-up, and again after each step before you read the clock.",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def timed(device, step, warmup, steps):
#     """Seconds that each of `steps` calls of step() takes on the device, after `warmup` calls that do not count."""
#     for _ in range(warmup):
#         step()
#     samples = []
#     for _ in range(steps):
#         device.synchronize()
#         before = device.clock()
#         step()
#         device.synchronize()
#         samples.append(device.clock() - before)
#     return samples
# ```
# </details>
#
# The check shows the arguments `(warmup, steps)` alone. Until your timer is right, the next cells use a list of numbers.

# %%
import random
from statistics import mean, median, stdev

draw = random.Random(0)
noisy = [0.2, 0.08, 0.03] + [draw.gauss(0.010, 0.0004) + 0.012 * (draw.random() < 0.05) for _ in range(60)]

def samples_of(warmup):
    if not written:
        return [seconds + ASK for seconds in noisy[warmup:]]
    device, left = Device(), iter(noisy)
    return timed(device, lambda: device.launch(next(left)), warmup, len(noisy) - warmup)

# %% [markdown]
# ## Mean, median, warm-up
# Real steps vary. The next cell has 63 steps: three slow ones at first, then 10 ms each, and now and then one of 22 ms, when
# something else ran on the machine.
#
# **Predict.** Which number suffers most from the three slow steps: mean, median or standard deviation?

# %%
figure, panels = plt.subplots(1, 2, figsize=(5.6, 3), sharey=True)
for panel, warmup, colour, hatch in zip(panels, (0, 3), (ORANGE, BLUE), ("xx", "//")):
    ms = [1e3 * s for s in samples_of(warmup)]
    panel.hist(ms, bins=[10 ** (0.9 + i / 16) for i in range(25)], color=colour, hatch=hatch, edgecolor="white")
    panel.set(xscale="log", xlabel="ms", title=f"warm-up of {warmup}", xticks=(10, 20, 50, 100, 200))
    panel.set_xticklabels((10, 20, 50, 100, 200)), panel.minorticks_off()
    print(f"warm-up of {warmup}: mean {mean(ms):5.2f} ± {stdev(ms):5.2f} ms, median {median(ms):5.2f} ms")
panels[0].set(ylabel="steps")
plt.show()

# %% [markdown]
# **Figure 1.** The samples as histograms, on a logarithmic axis (drawn at random). Look at the bars at 30, 80 and 200 ms in
# the left panel: three of 63 samples add nearly half to the mean and hardly move the median. The standard deviation warns
# you: it is larger than the mean.
#
# So: warm up, look at the samples, and report the median as well as the mean. A long run costs the *mean* of its steps,
# hiccups included.
#
# ## Is it really faster?
# Now a real machine: this one. Two products of matrices, one with 44 % more work. The CPU is synchronous, so
# `time.perf_counter` alone is right.
#
# **Predict.** Will the larger product be slower in *every* one of 128 pairs? In which share of them?

# %%
import time

def seconds(n):
    a = torch.ones(n, 400)
    start = time.perf_counter()
    a @ a.mT
    return time.perf_counter() - start

threads = torch.get_num_threads()
torch.set_num_threads(1)  # several threads would wait for each other on a busy machine
for _ in range(20):
    seconds(100), seconds(120)
pairs = [(seconds(120), seconds(100)) for _ in range(128)]
torch.set_num_threads(threads)
ratios = sorted(large / small for large, small in pairs)
print(f"work: {120**2 / 100**2:.2f} times as much")
print(f"ratios from {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}; "
      f"the larger is slower in {sum(r > 1 for r in ratios)} of 128 pairs")
print(f"99 % interval for the median: {ratios[48]:.2f} to {ratios[-49]:.2f}")  # the 49th from each end

# %% [markdown]
# A single pair proves nothing: some pairs may even say the opposite. Measure in pairs, so that whatever slows the machine slows
# both, and look at the interval of the median. It needs no assumption about the noise. Each ratio lies above the true median
# with a chance of one half, as a coin falls. So it is hardly possible that more than 79 of 128 lie on one side, and the true
# median is between the 49th from below and the 49th from above. If this interval contains 1, the answer is *not known yet*:
# measure more pairs. The numbers above are of the machine that made this page; run the cell for yours.
#
# **Change.** Compare 100 with 101. How many pairs do you need until the interval leaves 1 out?
#
# ## What should it take?
# A timer says what a layer takes. A *roofline* says what it should take at best. A kernel is limited by arithmetic or by
# memory:
#
# seconds ≥ max(FLOPs / peak, bytes / bandwidth)
#
# The *intensity* is FLOPs for each byte moved. Where it is below peak / bandwidth, the *ridge*, memory sets the pace.
#
# A product of (m, k) and (k, n) takes 2·m·k·n FLOPs. It reads both matrices and writes the result, so it moves at least
# m·k + k·n + m·n numbers of 2 bytes.
#
# **Predict.** The four products below are from a layer of GPT-2's size, batch 8 and context 1,024. One is far below the ridge
# of an A100. Which?

# %%
PEAK, BANDWIDTH = 312e12, 2.039e12  # A100: FLOP/s in bfloat16, bytes/s
T, WIDTH = 8 * 1024, 768
products = {  # how many products of (m, k) and (k, n)
    "q_proj": (1, T, WIDTH, WIDTH), "mlp up": (1, T, WIDTH, 4 * WIDTH), "head": (1, T, WIDTH, 50257),
    "scores": (8 * 12, 1024, 64, 1024),
}
ridge = PEAK / BANDWIDTH
print(f"the ridge is at {ridge:.0f} FLOPs a byte")
plt.plot([8, ridge, 2000], [8 * BANDWIDTH / 1e12, PEAK / 1e12, PEAK / 1e12], color=INK)
for (name, (count, m, k, n)), mark, colour, below in zip(
    products.items(), "osD^", (BLUE, GREEN, PURPLE, ORANGE), (0.86, 1.4, 0.86, 0.86)
):
    flops, moved = count * 2 * m * k * n, count * 2 * (m * k + k * n + m * n)
    least = max(flops / PEAK, moved / BANDWIDTH)
    x, y = flops / moved, flops / least / 1e12
    plt.plot(x, y, mark, color=colour, markersize=9)
    plt.annotate(name, (x, y * below), ha="center" if x > ridge else "left", va="top")
    bound = "arithmetic" if x > ridge else "memory"
    print(f"{name:7} {x:4.0f} FLOPs a byte: at least {1e6 * least:6.0f} µs, at most {y:3.0f} TFLOP/s, bound by {bound}")
plt.xscale("log"), plt.yscale("log"), plt.ylim(10, 600)
plt.xlabel("FLOPs a byte"), plt.ylabel("TFLOP/s, at most")
plt.show()

# %% [markdown]
# **Figure 2.** The roof of an A100 and four products on it (computed). The slope is the bandwidth, the flat part is the
# peak, and they meet at the ridge. Three marks are on the flat part. `scores` alone is on the slope, because its k is only
# 64: each number of the result takes 2·64 FLOPs and 2 bytes to write. So its intensity stays below 64, however large m and n
# are. Compare times, too: `scores` has a third more FLOPs than `q_proj` and takes 3.6 times as
# long, because its output is a matrix of 1,024 × 1,024 for each of 96 heads. Notebook 3 is about not writing that matrix. (Without a mask; a causal mask leaves half of its FLOPs.)
#
# **Change.** Use float32 on an A100 without tensor cores: 19.5 TFLOP/s and 4 bytes instead of 2. Where is the ridge then, and
# which products are left of it?
#
# **Next:** time real steps on a simulated GPU: `lab check benchmarking.benchmark`.
