# %% [markdown]
# # 6 · A 4D mesh: how can one model be cut in four ways at once?
# A large model is cut along its batch, its layers, its experts and its matrices. Each cut is an *axis* of a grid of ranks.
# In this notebook you find every rank's neighbours by slicing an array. Then you cut a product in two, and fill a pipeline.
#
# You write one function of about five lines, `summands`. Chapter: [A 4D mesh](../handout/mesh.md).

# %% [markdown]
# ## A mesh is an array of ranks
# Eight ranks as data=2 × pipe=2 × expert=1 × tensor=2. Rank numbers fill the array in order, so the last axis counts
# fastest.
#
# **Predict.** Rank 5: who is its neighbour along `tensor`? Along `pipe`? Along `data`?

# %%
AXES = ("data", "pipe", "expert", "tensor")
grid = torch.arange(8).reshape(2, 2, 1, 2)

def groups(axis):
    """All groups along an axis: ranks that differ in this coordinate alone."""
    dim = AXES.index(axis)
    return grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()

place = (grid == 5).nonzero()[0].tolist()
print("rank 5 stands at", dict(zip(AXES, place)))
for axis in AXES:
    mine = next(group for group in groups(axis) if 5 in group)
    print(f"{axis:6}  all groups {groups(axis)}, of rank 5 {mine}")

# %%
def draw(axes, axis, columns=4):
    """The ranks as boxes; those of one group have one colour and one hatch."""
    looks = list(zip((BLUE, ORANGE, GREEN, PURPLE) * 2, ("", "///", "...", "xxx", "\\\\", "++", "oo", "**")))
    for number, group in enumerate(groups(axis)):
        for rank in group:
            y, x = divmod(rank, columns)
            colour, hatch = looks[number]
            axes.barh(y, 0.92, left=x - 0.46, height=0.9, color=colour, hatch=hatch, edgecolor="white")
            box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
            axes.text(x, y, str(rank), ha="center", va="center", color="black", bbox=box)
    axes.set(title=axis, xticks=[], yticks=[], ylim=(1.5, -0.5)), axes.grid(False)

figure, panels = plt.subplots(2, 2, figsize=(5.4, 3.4))
for panel, axis in zip(panels.flat, AXES):
    draw(panel, axis)
plt.show()

# %% [markdown]
# **Figure 1.** The same eight ranks, once for each axis. Look at one rank in all four panels: boxes of its colour and hatch
# are its group. If a row is a machine, only `data` leaves the machine. That is intended: tensor groups talk many times a
# layer, data groups once a step.
#
# **Change.** Make the grid `torch.arange(16).reshape(2, 2, 2, 2)` and give `draw` four rows with `ylim=(3.5, -0.5)`. Which
# ranks does rank 0 meet along `expert`?
#
# ## Tensor parallelism: a product in two parts
# A transformer's MLP is y = relu(x A) B. We want each of W ranks to hold a W-th of A and of B, and to send as little as
# possible.
#
# **Predict.** Suppose rank 0 has the left half of A's *columns*. Which half of B does it need to go on without asking
# anyone?
#
# Column j of A makes hidden number j, and row j of B uses it. So a rank that has some columns of A needs the same rows of
# B. It then computes a summand of y, and one all-reduce adds the summands:
#
# y = relu(x A₀) B₀ + relu(x A₁) B₁
#
# **Your turn.** Return the summand of each rank, as a list. `A.chunk(W, dim=1)` cuts by columns, `dim=0` by rows.

# %%
def summands(x, A, B, W):
    """What each of W ranks computes of relu(x @ A) @ B."""
    ...

# %%
x = torch.tensor([[1.0, 2.0]])
A = torch.tensor([[1.0, 0.0, 2.0, -1.0], [0.0, 1.0, -1.0, 1.0]])
B = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0], [1.0, 1.0]])
ours, theirs = torch.tensor([[1.0, 4.0]]), torch.tensor([[1.0, 1.0]])
written = check(
    summands,
    [((x, A, B, 1), [ours + theirs]), ((x, A, B, 2), [ours, theirs])],
    "Rank r takes the r-th block of A's columns and the r-th block of B's rows.",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def summands(x, A, B, W):
#     """What each of W ranks computes of relu(x @ A) @ B."""
#     parts = []
#     for columns, rows in zip(A.chunk(W, dim=1), B.chunk(W, dim=0)):
#         hidden = (x @ columns).relu()  # a W-th of the hidden numbers, on one rank
#         parts.append(hidden @ rows)
#     return parts
# ```
# </details>
#
# ## Why not rows first?
# **Predict.** The next cell cuts A by rows instead, and x by columns to fit. Each rank applies relu to its part of the sum.
# How wrong is the result?

# %%
torch.manual_seed(0)
x, A, B = torch.randn(4, 8), torch.randn(8, 32), torch.randn(32, 8)
whole = (x @ A).relu() @ B
halves = list(zip(x.chunk(2, dim=1), A.chunk(2, dim=0)))
early = sum((part @ rows).relu() for part, rows in halves) @ B  # relu before the sum is whole
late = sum(part @ rows for part, rows in halves).relu() @ B  # an all-reduce before relu: right, but one more message
columns = sum((x @ a).relu() @ b for a, b in zip(A.chunk(2, dim=1), B.chunk(2, dim=0)))
for name, y in (("columns, then rows", columns), ("rows, relu too early", early), ("rows, sum before relu", late)):
    print(f"{name:22} off by {(y - whole).abs().max():.1e}")

# %% [markdown]
# relu(a) + relu(b) is not relu(a + b). Rows first needs an all-reduce in the middle, of the *hidden* numbers, which are the
# widest of all. Columns first needs none.
#
# **The way back.** Each rank's summand gives a gradient for x, and every rank uses all of x. So backward has one all-reduce
# too, at the other end: it adds the gradients of x.

# %%
leaf = x.clone().requires_grad_()
((leaf @ A).relu() @ B).square().sum().backward()
dy = 2 * whole  # the same on all ranks, since all have y
parts = []
for a, b in zip(A.chunk(2, dim=1), B.chunk(2, dim=0)):
    own = x.clone().requires_grad_()
    ((own @ a).relu() @ b).backward(dy)
    parts.append(own.grad)
print(f"one rank's gradient of x is off by {(parts[0] - leaf.grad).abs().max():.1f}, "
      f"their sum by {(sum(parts) - leaf.grad).abs().max():.0e}")

# %% [markdown]
# ## Pipelines: who waits for whom?
# Four stages hold a fourth of the layers each. The batch is cut into micro-batches. A forward through a stage takes 1 unit
# of time, a backward 2. Forward of micro-batch i needs the forward in the stage before. Backward needs the backward in the
# stage after.
#
# *GPipe* does all forwards, then all backwards. *1F1B* does a few forwards to warm up, and then takes turns. `check` plays
# a list of actions for each rank, and complains if they cannot work.
#
# **Predict.** Six micro-batches are 18 units of work for each rank. How long does the step take by GPipe? By 1F1B?

# %%
from lab.cluster.schedule import Action, check as play
from lab.plots.schedule import schedule

F, BW = (lambda i: Action("forward", i)), (lambda i: Action("backward", i))

def gpipe(stages, m):
    return [[*map(F, range(m)), *map(BW, reversed(range(m)))] for _ in range(stages)]

def turns(stages, m, ahead=None):
    """Some forwards ahead (default: as many as stages follow), then one forward, one backward."""
    ranks = []
    for r in range(stages):
        warm = min(m, stages - 1 - r if ahead is None else ahead)
        order = [F(i) for i in range(warm)]
        for i in range(m):
            order += ([F(i + warm)] if i + warm < m else []) + [BW(i)]
        ranks.append(order)
    return ranks

runs = {"GPipe": play(gpipe(4, 6), 6), "1F1B": play(turns(4, 6), 6)}
figure, panels = plt.subplots(2, 1, figsize=(5.6, 5))
for panel, (name, run) in zip(panels, runs.items()):
    schedule(panel, run, name, end=28)
    panel.grid(False)
plt.show()
for name, run in runs.items():
    print(f"{name:6} {run.length:.0f} units, {run.busy:.0f} busy, idle / busy {run.bubble:.2f}, activations kept {run.live}")

# %% [markdown]
# **Figure 2.** Two schedules of the same work (played on logical clocks). Look at the gaps: a rank waits 9 units in
# both. The waiting comes from filling and emptying the pipeline: three forwards of 1 unit pass before the last rank can
# start, and three backwards of 2 units after its last one. No order of the work avoids these 3 + 6 units. But a forward
# leaves activations until its backward. GPipe keeps six on every rank. 1F1B keeps 4 − r on rank r.
#
# ## How much of a head start?
# **Predict.** What if every rank warms up with no forward at all? With 3? With 5? Guess the length and the activations.

# %%
for ahead in (0, 1, 2, 3, 5):
    run = play(turns(4, 6, ahead), 6)
    print(f"{ahead} ahead on every rank: {run.length:3.0f} units, activations {run.live}")
print(f"3 − r ahead on rank r:  {runs['1F1B'].length:3.0f} units, activations {runs['1F1B'].live}")

# %% [markdown]
# With no head start, one micro-batch crosses the whole pipeline before the next begins. An equal head start on all ranks is
# never the best: the first rank needs the most, and the last rank needs none. Five ahead are as fast as 1F1B, but keep six
# activations everywhere. Exactly as many forwards as stages follow are enough.
#
# ## More micro-batches, smaller bubble
# **Predict.** The 9 units do not depend on the number of micro-batches. What share of the work are they with four stages and
# 32 micro-batches of 3 units each?

# %%
ms = (4, 8, 16, 32)
for stages, style, colour in ((2, "o-", BLUE), (4, "s--", ORANGE), (8, "^:", GREEN)):
    bubbles = [play(turns(stages, m), m).bubble for m in ms]
    plt.plot(ms, bubbles, style, color=colour, label=f"{stages} stages")
    print(f"{stages} stages:", *(f"m = {m}: {b:.3f} = {stages - 1}/{m};" for m, b in zip(ms, bubbles)))
plt.xscale("log", base=2), plt.xticks(ms, ms), plt.xlabel("micro-batches"), plt.ylabel("idle / busy"), plt.legend()
plt.show()

# %% [markdown]
# **Figure 3.** The bubble over the number of micro-batches (played). Look at the halving: twice the micro-batches, half the
# bubble. The law is (p − 1)/m for p stages. *Interleaving* gives each rank several thin stages instead of one thick one.
# That halves the bubble again, for twice the messages.
#
# ## Experts: a transpose of tokens
# A mixture of experts sends each token to the expert that a router picks. With one expert a rank, every rank sends some of
# its tokens to every other. Nothing is added up, so this is an all-to-all.
#
# **Predict.** Each of 4 ranks has 8 tokens. The router picks at random. Does each expert get 8?

# %%
torch.manual_seed(2)
W = 4
picked = torch.randint(W, (W, 8))  # of each rank's tokens, the expert
outbox = [[[f"{rank}.{t}" for t in range(8) if picked[rank, t] == e] for e in range(W)] for rank in range(W)]
inbox = [[outbox[source][e] for source in range(W)] for e in range(W)]  # the all-to-all: rows become columns
for e in range(W):
    print(f"expert {e} gets {sum(map(len, inbox[e])):2} tokens:", " | ".join(" ".join(part) for part in inbox[e]))

# %% [markdown]
# The loads differ, and the step waits for the fullest expert. So routers are trained with a loss that evens them out, and
# experts have a *capacity*, above which tokens are dropped.
#
# **Next:** do the same with real process groups: `lab check mesh.mesh`.
