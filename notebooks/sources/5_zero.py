# %% [markdown]
# # 5 · ZeRO: why should every rank keep the same thing?
# Data parallelism keeps W copies of everything: parameters, gradients, and the optimizer's state. For a model of 7 B
# parameters in mixed precision that is 112 GB on *each* rank. In this notebook you cut the largest part, AdamW's
# state, into W pieces by hand. Then you check that training still gives the same numbers.
#
# You write one function of about six lines, `sharded_step`. Chapter: [ZeRO](../handout/zero.md).

# %% [markdown]
# ## What a step holds
# **Predict.** A model has S bytes of parameters in float32. After one step of AdamW, how many bytes are alive: S, 2 S, 3 S
# or 4 S?

# %%
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 16)).sum().backward()
optimizer.step()

held = {
    "parameters": sum(p.nbytes for p in model.parameters()),
    "gradients": sum(p.grad.nbytes for p in model.parameters()),
    "state": sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim),
}
for name, size in held.items():
    print(f"{name:10} {size:6,} bytes, {size / held['parameters']:.0f} S")

# %% [markdown]
# 4 S, and half of it is state. AdamW keeps two numbers for each parameter: a mean m of the gradients, and a mean v of their
# squares. In mixed precision the state is even larger beside the rest: 12 bytes a parameter, next to 2 for the parameter
# and 2 for its gradient.
#
# ## AdamW does not look sideways
# Here is the update, on vectors. Read it and ask: does the new value of one parameter depend on any other parameter?

# %%
LR, BETA1, BETA2, EPS, DECAY = 0.02, 0.9, 0.999, 1e-8, 0.01

def fresh(n):
    return {"m": torch.zeros(n), "v": torch.zeros(n), "t": 0}

def adamw(weights, grad, state):
    """New weights; `state` is changed in place."""
    state["t"] += 1
    state["m"] = BETA1 * state["m"] + (1 - BETA1) * grad
    state["v"] = BETA2 * state["v"] + (1 - BETA2) * grad * grad
    m = state["m"] / (1 - BETA1 ** state["t"])
    v = state["v"] / (1 - BETA2 ** state["t"])
    return weights - LR * (m / (v.sqrt() + EPS) + DECAY * weights)

# %% [markdown]
# Every operation works on one element at a time. So we may cut the vectors wherever we like, and each piece can be
# updated on another rank.
#
# **Predict.** We update ten numbers as a whole, and in pieces of 3, 3, 2 and 2. Do the results agree to the last bit, or up
# to rounding?

# %%
weights, grad = torch.randn(10), torch.randn(10)
whole = adamw(weights, grad, fresh(10))
pieces = [adamw(w, g, fresh(len(w))) for w, g in zip(weights.tensor_split(4), grad.tensor_split(4))]
print("pieces of", [len(p) for p in pieces], "numbers; equal to the last bit:", torch.equal(whole, torch.cat(pieces)))

# %% [markdown]
# To the last bit: each element sees the same operations in the same order.
#
# ## A step of ZeRO, by hand
# There are W ranks. All of them hold the same weights, as one flat vector. Each has its own gradient, since each has its own
# share of the batch. Rank r keeps only the r-th piece of AdamW's state. A step then has three parts:
#
# 1. **Reduce-scatter:** rank r gets the mean of all ranks' gradients, but only its own piece of it.
# 2. **Step:** rank r updates its piece of the weights with its piece of the state.
# 3. **All-gather:** the pieces are put together, and all ranks have them.
#
# **Your turn.** Write it for a list of ranks. `weights` is the flat vector, `grads` has one vector for each rank, and
# `states` one state for each rank. Cut vectors with `x.tensor_split(W)`, use `adamw` from above, and return the new weights.

# %%
def sharded_step(weights, grads, states):
    """The weights after one step, of which rank r computes the r-th piece."""
    ...

# %%
def case(n, W):
    """Weights 1 … n; rank r's gradients are r + 1 times as large; the state is of a training that has begun."""
    weights = torch.arange(1.0, n + 1)
    grads = [(r + 1) * weights for r in range(W)]
    state = lambda piece: {"m": 0 * piece, "v": piece.clone(), "t": 2}
    want = adamw(weights, sum(grads) / W, state(weights))
    return (weights, grads, [state(piece) for piece in weights.tensor_split(W)]), want

written = check(
    sharded_step,
    [case(4, 1), case(4, 2), case(5, 3)],
    "Take piece r of each gradient, average over the ranks, and update piece r of the weights with state r.",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def sharded_step(weights, grads, states):
#     """The weights after one step, of which rank r computes the r-th piece."""
#     W = len(grads)
#     updated = []
#     for rank, piece in enumerate(weights.tensor_split(W)):
#         mean = sum(g.tensor_split(W)[rank] for g in grads) / W  # reduce-scatter
#         updated.append(adamw(piece, mean, states[rank]))  # a W-th of the step
#     return torch.cat(updated)  # all-gather
# ```
# </details>
#
# The states in the check are of a training that has begun. AdamW's very first step hardly depends on the size of a gradient,
# so it would not notice a sum in place of the mean. If yours is not right yet, the cells below average everything first.

# %%
def averaged_first(weights, grads, states):
    pieces = zip(weights.tensor_split(len(grads)), (sum(grads) / len(grads)).tensor_split(len(grads)), states)
    return torch.cat([adamw(*piece) for piece in pieces])

step = sharded_step if written else averaged_first

# %% [markdown]
# ## The same training on 1, 2 and 4 ranks
# A small regression: 48 samples, 24 weights. The ranks share out the samples. The whole batch is used in each step, so that
# a mistake in the step would show in the loss.

# %%
torch.manual_seed(1)
inputs = torch.randn(48, 24)
targets = inputs @ torch.randn(24) / 5 + 0.3 * torch.randn(48)

def gradient(w, x, y):
    return 2 * x.mT @ (x @ w - y) / len(x)

def loss(w):
    return (inputs @ w - targets).square().mean().item()

def train(W, steps, weights, states):
    losses = []
    for _ in range(steps):
        grads = [gradient(weights, x, y) for x, y in zip(inputs.tensor_split(W), targets.tensor_split(W))]
        weights = step(weights, grads, states)
        losses.append(loss(weights))
    return weights, losses

runs = {}
for W in (1, 2, 4):
    states = [fresh(len(piece)) for piece in torch.zeros(24).tensor_split(W)]
    runs[W] = train(W, 40, torch.zeros(24), states)
    print(f"W = {W}: loss {loss(torch.zeros(24)):.4f} → {runs[W][1][-1]:.4f}, state on a rank: {2 * 4 * len(states[0]['m'])} bytes, "
          f"farthest from W = 1: {max(abs(a - b) for a, b in zip(runs[W][1], runs[1][1])):.0e}")

# %% [markdown]
# The losses agree to about seven digits. The rest is the order of sums: four ranks average four partial gradients. The state
# on a rank is a W-th.
#
# ## Going on with another number of ranks
# A training starts on 2 ranks, then a node is added, then one fails: 2, 4, and 3 ranks. Only the state has to move. A
# checkpoint puts the pieces together, and each new rank takes its own.
#
# **Predict.** Will the loss jump where the number of ranks changes? What would happen if each new rank began with zeros?

# %%
def reshard(states, W):
    """The same state in W pieces."""
    pieces = {key: torch.cat([s[key] for s in states]).tensor_split(W) for key in ("m", "v")}
    return [{"m": m, "v": v, "t": states[0]["t"]} for m, v in zip(pieces["m"], pieces["v"])]

def changing(keep):
    weights, losses, states = torch.zeros(24), [], [fresh(24)]
    for W in (2, 4, 3):
        states = reshard(states if keep else [fresh(24)], W)
        weights, more = train(W, 60, weights, states)
        losses += more
    return losses

alone = train(1, 180, torch.zeros(24), [fresh(24)])[1]
kept, forgot = changing(keep=True), changing(keep=False)
plt.plot(alone, color=INK, linewidth=1, label="one rank, never interrupted")
for first, W, mark, colour in ((0, 2, "o", BLUE), (60, 4, "s", ORANGE), (120, 3, "^", GREEN)):
    plt.plot(range(first, first + 60, 3), kept[first : first + 60 : 3], mark, color=colour, markersize=5, label=f"{W} ranks")
plt.plot(forgot, ":", color=PURPLE, linewidth=2, label="state forgotten at each change")
plt.axvline(59.5, color="0.6", linestyle="--"), plt.axvline(119.5, color="0.6", linestyle="--")
plt.xlabel("step"), plt.ylabel("loss"), plt.ylim(0.028, 0.06), plt.legend()
plt.show()
print(f"after 180 steps: {alone[-1]:.6f} uninterrupted, {kept[-1]:.6f} with the state, {forgot[-1]:.6f} without it")

# %% [markdown]
# **Figure 1.** Loss over steps (measured here), from where it is below 0.06. Look at the dashed lines: the marks go on along
# the black curve. The dotted curve leaves it there, and rises: with an empty state AdamW behaves as in its first steps again. It moves every
# weight by about `LR`, although the gradients are small by now. Then it must come back.
#
# **Change.** Keep m and v, but reset `t` to 0 in `reshard`. What goes wrong, and for how long?
#
# ## When cutting is not free
# Clipping by the global norm does look sideways. It needs the length of the *whole* gradient.
#
# **Predict.** Each rank clips its own piece to length 1. How long is the whole gradient then, on 4 ranks?

# %%
grad = torch.randn(24) * 3
clip = lambda g, norm: g * min(1.0, 1.0 / norm)
own = torch.cat([clip(piece, piece.norm()) for piece in grad.tensor_split(4)])
squares = sum(piece.square().sum() for piece in grad.tensor_split(4))  # one number a rank: an all-reduce
right = torch.cat([clip(piece, squares.sqrt()) for piece in grad.tensor_split(4)])
print(f"each piece by its own length: {own.norm():.3f};  by the summed squares: {right.norm():.3f}")

# %% [markdown]
# One all-reduce of a single number repairs it. Other optimizers, such as Muon, need whole matrices; they are harder to cut.
#
# ## The three stages in bytes
# Nothing but the step needs the state. Go on with the same thought: gradients are needed only on the rank that steps, and
# a layer's parameters only while it computes. In float32 a parameter costs 4 bytes, its gradient 4, its state 8.
#
# **Predict.** Which stage saves the most on 2 ranks, compared with the stage before it? Which on 1,024?

# %%
def held_bytes(stage, W):
    """(parameters, gradients, state), in bytes for each parameter of the model, on one rank."""
    return 4 / (W if stage >= 3 else 1), 4 / (W if stage >= 2 else 1), 8 / (W if stage >= 1 else 1)

worlds, stages = (1, 2, 4, 8), ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
figure, panels = plt.subplots(2, 2, figsize=(5.4, 4.8), sharex=True, sharey=True)
looks = (("parameters", BLUE, ""), ("gradients", ORANGE, "///"), ("state", GREEN, "..."))
for stage, panel in enumerate(panels.flat):
    below = [0.0] * len(worlds)
    for kind, (name, colour, hatch) in enumerate(looks):
        high = [held_bytes(stage, W)[kind] for W in worlds]
        panel.bar(range(4), high, bottom=below, color=colour, hatch=hatch, edgecolor="white", label=name)
        below = [b + h for b, h in zip(below, high)]
    panel.set(title=stages[stage], xticks=range(4), xticklabels=worlds)
figure.supxlabel("ranks"), figure.supylabel("bytes a parameter")
figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
plt.show()
for stage, name in enumerate(stages):
    print(f"{name:13}", *(f"W = {W:<5}{sum(held_bytes(stage, W)):6.2f}" for W in (*worlds, 1024)))

# %% [markdown]
# **Figure 2.** Bytes a parameter on one rank, float32 AdamW (computed). Look at the green part first: the state is half of
# all, so stage 1 saves the most at first. With many ranks stages 1 and 2 level off at what stays whole, 8 and 4 bytes.
#
# ## What is sent
# Your step sends a reduce-scatter of gradients and an all-gather of weights. A ring all-reduce *is* a reduce-scatter
# followed by an all-gather. So stage 1 sends what data parallelism sends.

# %%
from lab.cluster.costs import sent_bytes

W, S = 4, 80e6  # 20 M parameters in float32
print(f"all-reduce of gradients:            {sent_bytes('all_reduce', S, W) / 1e6:.0f} MB from each rank")
print(f"reduce-scatter, then all-gather:    {(sent_bytes('reduce_scatter', S / W, W) + sent_bytes('all_gather', S / W, W)) / 1e6:.0f} MB")

# %% [markdown]
# Memory for free, then? Nearly: the all-gather comes after the step and cannot hide behind backward. It can hide behind the
# next forward, as Megatron's distributed optimizer does. In the chapter, `fsdp_prefetch` hides the all-gathers of ZeRO-3 in
# a similar way, one layer ahead.
#
# **Next:** the same on real ranks, with whole tensors as pieces: `lab check zero.zero1`.
