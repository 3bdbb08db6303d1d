# %% [markdown]
# # 2 · Mixed precision: which half of the bits can go?
# Numbers with 16 bits take half of the memory, and tensor cores multiply them several times as fast. But a training that
# simply casts everything to 16 bits fails, sometimes without an error. In this notebook you see the three ways in which it
# fails, and build the cure for each.
#
# You write one function of about seven lines, `careful_sum`. Chapter: [Mixed precision](../handout/mixed_precision.md).

# %% [markdown]
# ## Two ways to spend 16 bits
# **Predict.** float16 has 5 bits of exponent and 10 of fraction; bfloat16 has 8 and 7. Which can hold 100,000? Which can tell
# 1.001 from 1?

# %%
print(f"{'':9} {'largest':>10} {'smallest normal':>16} {'smallest':>10} {'gap above 1':>12}   100,000    1.001")
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    info = torch.finfo(dtype)
    small = info.smallest_normal * info.eps
    print(f"{str(dtype)[6:]:9} {info.max:10.3g} {info.smallest_normal:16.3g} {small:10.3g} {info.eps:12.3g}"
          f"{torch.tensor(1e5).to(dtype).item():10g} {torch.tensor(1.001).to(dtype).item():8g}")

# %% [markdown]
# float16 has fine steps and a short range. bfloat16 has the range of float32 and coarse steps. Look at the last two columns:
# 100,000 is above float16's largest number and becomes infinite, while bfloat16 rounds it to 99,840. Around 1, bfloat16 moves
# in steps of 2⁻⁷ ≈ 0.0078, so 1.001 is rounded to 1. Each of the two fails in its own way.
#
# ## Failure 1: a sum that stands still
# **Predict.** We add 0.01 ten thousand times. Where does the sum stop in bfloat16? In float16? Would it stop at all in
# float32?

# %%
def plain_sum(numbers, dtype):
    """One addition after the other, each rounded to dtype."""
    total = torch.zeros((), dtype=dtype)
    for number in numbers.to(dtype):
        total = total + number
    return total.item()

numbers = torch.full((10_000,), 0.01)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    print(f"{str(dtype)[6:]:9} {plain_sum(numbers, dtype):8.3f}")

# %% [markdown]
# No error, no warning. At 4, the neighbours of a bfloat16 number are 1/32 apart. Adding 0.01 moves less than half of that,
# so the sum is rounded back to where it was. float16 has three more bits of fraction. Its gap grows to the same 1/32 at a sum
# eight times as large, so it stops at 32. float32 does not stop here, but its many small roundings add up to 0.003. Tensor cores therefore multiply in 16 bits and *accumulate* in 32.
#
# **What if there is no wider type?** Then keep what each addition loses. If `total + x` was rounded to `new`, then
# `(new − total) − x` is what was added too much. Subtract it from the next number. Try it at 4 in bfloat16: the first 0.01 is
# lost, so the excess is −0.01. The next number then counts as 0.02. That is more than half of the gap, and the sum moves. This is Kahan's compensated sum, and some
# optimizers use it to keep parameters in bfloat16.
#
# **Your turn.** Keep two numbers of the given dtype, the total and what is too much so far. All operations stay in that dtype.

# %%
def careful_sum(numbers, dtype):
    """The sum, with two numbers of dtype as its only memory."""
    ...

# %%
ones = torch.ones(1000)
cases = [((torch.tensor([1.0, 2.0]), torch.float32), 3.0), ((ones, torch.bfloat16), 1000.0), ((ones, torch.float16), 1000.0)]
written = check(careful_sum, cases, "Each number first loses what was added too much before; then find the new excess.")

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def careful_sum(numbers, dtype):
#     """The sum, with two numbers of dtype as its only memory."""
#     total = excess = torch.zeros((), dtype=dtype)
#     for number in numbers.to(dtype):
#         wanted = number - excess
#         new = total + wanted
#         excess = (new - total) - wanted
#         total = new
#     return total.item()
# ```
# </details>

# %%
if written:
    for dtype in (torch.float16, torch.bfloat16):
        print(f"{str(dtype)[6:]:9} plain {plain_sum(numbers, dtype):7.2f}, careful {careful_sum(numbers, dtype):7.2f}")

# %% [markdown]
# With the solution, the last cell prints 100 for float16 and 99 for bfloat16. The exact sum is 100, and bfloat16's neighbours
# there are half a unit apart. So the careful sum is nearly as good as the dtype allows, where the plain one reached 4.
#
# ## Failure 2: a weight that does not move
# A weight is a sum, too: the start and all updates.
#
# **Predict.** A weight of 1 gets an update of 2⁻⁹ in each of 40 steps. Where is it at the end in bfloat16? And with a *master*
# in float32 that is cast to bfloat16 for each forward?

# %%
weight = torch.tensor(1.0, dtype=torch.bfloat16)
master = torch.tensor(1.0)
alone, copied = [], []
for _ in range(40):
    weight = weight + torch.tensor(2**-9, dtype=torch.bfloat16)
    master = master + 2**-9
    alone.append(weight.item()), copied.append(master.bfloat16().item())
plt.plot(alone, "s", color=ORANGE, markersize=4, label="bfloat16 alone")
plt.step(range(40), copied, where="mid", color=BLUE, label="rounded copy of a float32 master")
plt.xlabel("step"), plt.ylabel("weight"), plt.legend()
plt.show()
print(f"alone {alone[-1]}, with a master {copied[-1]}, exact {1 + 40 * 2**-9}")

# %% [markdown]
# **Figure 1.** A weight over 40 equal updates (computed). Look at the stairs: the copy moves when the master has collected half
# of a gap. The squares never move.
#
# ## Failure 3: gradients that are zero
# float16 has steps that are fine enough, but nothing below 2⁻²⁴. Here are the gradients that a small transformer's
# backward pass computes, counted by their power of two.
#
# **Predict.** What share of them would float16 round to zero?

# %%
from lab.model.transformer import SIZES, Transformer

torch.manual_seed(0)
model, tokens = Transformer(SIZES["tiny"]), torch.randint(256, (8, 128))
seen = []
for layer in model.modules():
    if isinstance(layer, torch.nn.Linear):
        layer.register_full_backward_hook(lambda layer, into, out: seen.append(out[0].flatten()))
model.loss(tokens, tokens.roll(-1, 1)).backward()
gradients = torch.cat(seen)
gradients = gradients[gradients != 0]

def lost(scale):
    """Shares that float16 rounds to zero, and to infinity."""
    half = (gradients * scale).half()
    return (half == 0).float().mean().item(), half.isinf().float().mean().item()

for power in (0, 6, 12, 18, 24):
    zero, infinite = lost(2.0**power)
    print(f"times 2^{power:<2}: {zero:7.2%} are zero, {infinite:7.2%} are infinite")
print(f"the largest is 2^{gradients.abs().max().log2():.1f}")

# %%
exponents = gradients.abs().log2()
bins = range(-40, 20)
plt.hist(exponents.clamp(min=-40).numpy(), bins=bins, color=BLUE, hatch="//", edgecolor="white", label="gradients")
plt.hist((exponents + 12).numpy(), bins=bins, histtype="step", color=ORANGE, linewidth=2, label="times 2¹²")
top = 1.3 * plt.ylim()[1]
for x, name in ((-24, "smallest "), (-14, "smallest normal "), (16, "largest ")):
    plt.axvline(x, color=INK, linestyle="--")
    plt.text(x, 0.97 * top, name, ha="right", va="top", rotation=90, fontsize=10)
plt.ylim(0, top), plt.xlabel("log₂ |gradient|"), plt.ylabel("how many")
plt.gcf().legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# **Figure 2.** Gradients by power of two, and the same times 2¹² (measured on the small model). Look at the dashed lines, the
# ends of float16, and compare the table above it: a part of the filled histogram lies left of "smallest". The outline has moved twelve steps to the right and
# fits between "smallest" and "largest". Scaling moves every gradient by the same number of powers of two, because a product
# by a power of two changes the exponent alone. No bit of the fraction is lost.
#
# So multiply the loss by a scale, and divide the gradients by it in float32. Which scale? The largest that does not overflow.
# Nobody knows it before, and it changes. So it is searched for all the time: halve it when a gradient is infinite, and double
# it after a while without.
#
# **Predict.** The largest gradient below grows sixteenfold at step 120. What does the scale do, and how many steps are lost?

# %%
def search(interval, steps=240):
    """The scale in each step, and the steps that were skipped."""
    scale, quiet, scales, skipped = 2.0**12, 0, [], []
    for t in range(steps):
        largest = 1.5 if t < 120 else 24.0
        overflow = scale * largest > torch.finfo(torch.float16).max
        scale, quiet = (scale / 2, 0) if overflow else (scale, quiet + 1)
        if overflow:
            skipped.append(t)
        if quiet == interval:
            scale, quiet = 2 * scale, 0
        scales.append(scale)
    return scales, skipped

for interval, style, colour in ((20, "-", BLUE), (80, "--", ORANGE)):
    scales, skipped = search(interval)
    plt.step(range(len(scales)), scales, style, where="post", color=colour, label=f"doubles after {interval} good steps")
    plt.plot(skipped, [scales[t] for t in skipped], "o", color=colour)
    print(f"interval {interval}: {len(skipped)} of {len(scales)} steps skipped, scale at the end 2^{math.log2(scales[-1]):.0f}")
plt.yscale("log", base=2), plt.xlabel("step"), plt.ylabel("scale"), plt.legend()
plt.show()

# %% [markdown]
# **Figure 3.** The scale over 240 steps (computed). Look at the dots: each is a step that was skipped. A short interval stays
# near the limit and pays with more skipped steps. At step 120 the solid curve falls from 2¹⁵ to 2¹¹: four
# halvings, and each costs a step. The dashed curve was still at 2¹³, so two are enough. Libraries double after 2,000 steps. bfloat16 needs no scale at all, and
# that is why it has won.
#
# ## What takes the memory, then?
# Weights in 16 bits, with a master and two moments in 32, are no smaller than before. The gain is in *activations*: what
# forward keeps for backward. A checkpoint keeps a block's input alone and computes the block again in backward.
#
# **Predict.** Six blocks. Where is the peak without checkpoints: at the end of forward or of backward? By what factor does it
# fall with them?

# %%
from dataclasses import replace
from torch.utils.checkpoint import checkpoint
from lab.measure.memory import meter
from lab.plots.memory import memory_timeline

SIZE, BATCH, CONTEXT = replace(SIZES["tiny"], layers=6, width=128, hidden=344), 8, 128

def step_memory(checkpointed, context=CONTEXT):
    """What a training step allocates, in order; parameters do not count."""
    model, tokens = Transformer(SIZE), torch.randint(256, (BATCH, context))
    if checkpointed:
        for block in model.blocks:
            block.forward = lambda *args, plain=block.forward: checkpoint(plain, *args, use_reentrant=False)
    with meter(inputs=[*model.parameters(), *model.buffers(), tokens]) as memory:
        loss = model.loss(tokens, tokens)
        memory.phase = "backward"
        loss.backward()
        del loss
    return memory

figure, both = plt.subplots(2, 1, figsize=(5.4, 5.4), sharey=True)
for axes, checkpointed in zip(both, (False, True)):
    memory = step_memory(checkpointed)
    memory_timeline(axes, memory, "each block checkpointed" if checkpointed else "plain")
    print(f"checkpointed {checkpointed!s:5}: peak {memory.peak_bytes / 2**20:.1f} MiB")
plt.show()

# %% [markdown]
# **Figure 4.** Bytes alive in a training step, by the phase in which they were allocated (measured). Look at the end of forward:
# the plain step has piled up the activations of all six blocks. With checkpoints forward keeps six inputs, and backward
# rises and falls once a block, when it computes the block again.
#
# **Change.** Double `CONTEXT`. Which part of the peak doubles, and which grows fourfold?
#
# **Next:** a sum in any dtype, with a bound on its error: `lab check mixed_precision.accumulate`.
