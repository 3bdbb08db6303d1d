# %% [markdown]
# # 4 · Data parallelism: why does a second device not halve the time?
# Two devices have each half of the work. They also have a new task: they must agree on the gradients. In this notebook
# you build the schedule of one training step by hand, with numbers that you can follow. You will see when messages hide
# behind the backward pass, and when they do not.
#
# You write one function of about five lines, `ends_s`. Chapter: [Data parallelism](../handout/ddp.md).

# %% [markdown]
# ## Four ranks, one model
# A rank is one of W processes, each with a copy of the model. Here the ranks are entries of a list. The model is one
# weight matrix, and each rank gets two of the eight samples.

# %%
torch.manual_seed(0)
W = 4
x, y = torch.randn(8, 3), torch.randn(8, 1)
start = torch.randn(3, 1)

def gradient(w, x, y):
    """Of the mean squared error of x @ w."""
    return 2 * x.mT @ (x @ w - y) / len(x)

shares = list(zip(x.chunk(W), y.chunk(W)))
own = [gradient(start, *share) for share in shares]
whole = gradient(start, x, y)
for rank, g in enumerate(own):
    print(f"rank {rank}:", *(f"{v:7.3f}" for v in g.flatten()))
for name, g in (("mean", sum(own) / W), ("whole", whole)):
    print(f"{name:>6}:", *(f"{v:7.3f}" for v in g.flatten()))

# %% [markdown]
# The ranks' gradients differ a lot. Their mean is the gradient of the whole batch, since all shares have the same size.
#
# **Predict.** The next cell trains twice for ten steps: once each rank uses its own gradient, once all use the mean.
# How far apart are the four copies of the weights after ten steps, in each case?

# %%
def spread(average, steps=10, lr=0.1):
    """Largest difference between two copies of the weights after some steps."""
    copies = [start.clone() for _ in range(W)]
    for _ in range(steps):
        grads = [gradient(w, *share) for w, share in zip(copies, shares)]
        if average:
            grads = [sum(grads) / W] * W  # what an all-reduce leaves on each rank
        copies = [w - lr * g for w, g in zip(copies, grads)]
    return max((a - b).abs().max().item() for a in copies for b in copies)

print(f"own gradients:  copies differ by up to {spread(average=False):.3f}")
print(f"mean gradients: copies differ by up to {spread(average=True):.3f}")

# %% [markdown]
# Equal starts and equal steps keep the copies equal, to the last bit. So the mathematics is simple. The question that is
# left is *when* the gradients travel.
#
# **Change.** Replace `sum(grads) / W` by `sum(grads)`. The copies stay equal, and yet the training is another one: it is
# as if `lr` were four times larger.

# %% [markdown]
# ## What a message costs
# A message of S bytes takes α + S·β seconds: a latency, and a time for each byte. A ring all-reduce over W ranks is
# 2(W − 1) messages, one after another, of S/W bytes each.

# %%
alpha, beta = 200e-6, 1 / 10e9  # 200 µs, and 10 GB/s

def all_reduce_s(size, W=4, alpha=alpha, beta=beta):
    return 2 * (W - 1) * (alpha + size / W * beta)

for size in (4e3, 400e3, 4e6, 40e6):
    cost = all_reduce_s(size)
    print(f"{size / 1e6:7.3f} MB: {1e3 * cost:5.2f} ms, of it {6 * alpha / cost:4.0%} latency")

# %% [markdown]
# Below a megabyte, nearly all of the time is latency. One large message is therefore cheaper than many small ones.
#
# ## One step as a schedule
# Our model has 24 gradients of 2 MB each. Forward takes 12 ms. Backward takes 24 ms and finishes one gradient each
# millisecond, the last layer first. The network carries one all-reduce at a time.
#
# **Your turn.** `ready_s` says when each message can leave, in order. `cost_s` says how long each takes on the network.
# Return when each message ends. Example: ready at 1, 2 and 9 s, each takes 3 s. The first ends at 4. The second is ready
# at 2 but must wait until 4, so it ends at 7. The third finds a free network and ends at 12.

# %%
def ends_s(ready_s, cost_s):
    """When each message has ended, on a network that carries one at a time, in this order."""
    ...

# %%
written = check(
    ends_s,
    [
        (([1.0, 2.0, 9.0], [3.0, 3.0, 3.0]), [4.0, 7.0, 12.0]),
        (([0.0, 0.0], [0.5, 0.25]), [0.5, 0.75]),
        (([5.0], [1.0]), [6.0]),
    ],
    "A message begins when it is ready and the one before it has ended, whichever is later.",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def ends_s(ready_s, cost_s):
#     """When each message has ended, on a network that carries one at a time, in this order."""
#     free, ends = 0.0, []
#     for ready, cost in zip(ready_s, cost_s):
#         free = max(ready, free) + cost
#         ends.append(free)
#     return ends
# ```
# </details>
#
# The rest of the notebook uses your function if it is right, and one of its own until then.

# %%
from itertools import accumulate

def kept_s(ready_s, cost_s):
    pairs = zip(ready_s, cost_s)
    return list(accumulate(pairs, lambda free, pair: max(pair[0], free) + pair[1], initial=0.0))[1:]

ends = ends_s if written else kept_s

# %% [markdown]
# ## Four wrappers
# A *bucket* is a group of gradients that travel as one message. The four wrappers of the chapter differ in two numbers
# only: how many gradients a bucket has, and whether it may leave before backward has ended.
#
# | wrapper | gradients a bucket | leaves |
# |---|---|---|
# | naive | 1 | after backward |
# | flat | 24 | after backward |
# | overlapped | 1 | during backward |
# | bucketed | 6 | during backward |
#
# **Predict.** Put the four in order, the fastest first. Which one hides most of its messages?

# %%
from lab.plots.timeline import Span, timelines

FORWARD, EACH, GRADIENTS, SIZE = 12e-3, 1e-3, 24, 2e6  # seconds, seconds, count, bytes
BACKWARD = FORWARD + GRADIENTS * EACH  # when backward has ended

def step(in_bucket, early, cost=all_reduce_s):
    """The spans of one rank in a step: all ranks do the same."""
    counts = [min(in_bucket, GRADIENTS - first) for first in range(0, GRADIENTS, in_bucket)]
    ready = [FORWARD + EACH * done if early else BACKWARD for done in accumulate(counts)]
    costs = [cost(count * SIZE) for count in counts]
    messages = [Span("message", "all_reduce", end - c, end) for c, end in zip(costs, ends(ready, costs))]
    last = max(BACKWARD, messages[-1].end_s)
    return [
        Span("forward", "forward", 0, FORWARD), Span("backward", "backward", FORWARD, BACKWARD),
        *messages, Span("step", "step", last, last + 2e-3),
    ]

WRAPPERS = {"naive": (1, False), "flat": (24, False), "overlapped": (1, True), "bucketed": (6, True)}
figure = timelines({name: [step(*how)] * 2 for name, how in WRAPPERS.items()}, width=5.6)
plt.show()
for name, how in WRAPPERS.items():
    spans = step(*how)
    sent = [s for s in spans if s.kind == "message"]
    print(f"{name:10}  {len(sent):2} messages, {1e3 * sum(s.end_s - s.start_s for s in sent):5.1f} ms on the network, "
          f"{1e3 * (spans[-1].start_s - BACKWARD):5.1f} ms after backward, step ends at {1e3 * spans[-1].end_s:.1f} ms")

# %% [markdown]
# **Figure 1.** One step of each wrapper on two of the four ranks, computed from the cost model above. Look at the lower bars: in *naive* and *flat*
# they begin where backward ends. In *overlapped* and *bucketed* they begin during backward, and only their ends stick out.
#
# All four spend the same time in forward and backward, because they compute the same. *Naive* pays 24 latencies behind
# backward. *Overlapped* begins early, but pays the same 24 latencies: the network is the slower one, and falls behind more with
# each gradient. *Bucketed* pays four latencies, and hides all but the last bucket. A bucket that leaves when the last gradient is ready can never be hidden. So some time always sticks out.

# %% [markdown]
# ## How large should a bucket be?
# **Predict.** Small buckets leave early and pay many latencies. Large ones pay few and leave late. Draw the curve of the
# step's time over the size of a bucket, in your head. Where is its lowest point if latency grows ten times?

# %%
ranks = W
counts = [1, 2, 3, 4, 6, 8, 12, 24]
sizes = [n * SIZE / 1e6 for n in counts]
links = {"200 µs, 10 GB/s": (alpha, beta), "2 ms, 10 GB/s": (10 * alpha, beta), "200 µs, 1 GB/s": (alpha, 10 * beta)}
for (name, (a, b)), style, colour in zip(links.items(), ("o-", "s--", "^:"), (BLUE, ORANGE, GREEN)):
    cost = lambda size: all_reduce_s(size, ranks, a, b)
    times = [1e3 * step(n, True, cost)[-1].end_s for n in counts]
    plt.plot(sizes, times, style, color=colour, label=name)
    best = min(range(len(counts)), key=times.__getitem__)
    print(f"{name:16} best bucket {counts[best] * SIZE / 1e6:4.0f} MB: {times[best]:6.1f} ms;  one each {times[0]:.1f} ms")
plt.xscale("log", base=2), plt.xticks(sizes, [f"{size:g}" for size in sizes])
plt.xlabel("bucket, MB"), plt.ylabel("step, ms"), plt.ylim(bottom=0), plt.legend()
plt.show()

# %% [markdown]
# **Figure 2.** The step's time over the size of a bucket, on three links (computed). Look at the lowest point of each curve.
# With ten times the latency it moves to the right: fewer, larger messages. With a tenth of the bandwidth the network needs
# 72 ms for the bytes alone, three times as long as backward: the size of a bucket matters little.
#
# **Change.** Set `ranks` in the first line of the cell above to 64. Each all-reduce then has 126 messages, which are smaller, so
# latency dominates: one bucket of 48 MB is best on all three links. Or set `EACH` to `4e-3` in the cell of Figure 1 and run
# both cells again. Backward then takes 96 ms. With that much arithmetic, small buckets hide all but the last message on the
# first link.

# %% [markdown]
# ## Does the order of a sum matter?
# Wrappers add up the same gradients in different orders: a bucket is cut into W chunks, and each chunk's sum starts at
# another rank. Floating-point addition is not associative.
#
# **Predict.** Four gradients of 10,000 float32 numbers are added in rank order, and again beginning with rank 1. What
# share of the sums differs, and by how much?

# %%
grads = torch.randn(W, 10_000)
first = grads[0] + grads[1] + grads[2] + grads[3]
second = grads[1] + grads[2] + grads[3] + grads[0]
off = (first - second).abs()
print(f"{(off > 0).float().mean():.0%} of the sums differ, by at most {off.max():.1e}")

# %% [markdown]
# The differences are a few of the last bits. All ranks receive the *same* sums, so the copies stay equal; two runs with
# different buckets differ slightly from each other. The loss curve therefore cannot tell you how a wrapper sends. That is
# why the tests of these exercises read the list of messages.
#
# **Next:** write these wrappers for real ranks, from `ddp.naive` on: `lab check ddp.naive`.
