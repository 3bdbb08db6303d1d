# %% [markdown]
# # 2 · Mixed precision and memory: what fits
# Gradients of the activations of a small transformer, which a float16 backward would compute with, as histograms
# over powers of two, with float16's range marked.

# %%
import torch
from lab.model.transformer import SIZES, Transformer

torch.manual_seed(0)
model, tokens = Transformer(SIZES["tiny"]), torch.randint(256, (8, 128))
seen = []
for layer in model.modules():
    if isinstance(layer, torch.nn.Linear):
        layer.register_full_backward_hook(lambda layer, into, out: seen.append(out[0].flatten()))
model.loss(tokens, tokens.roll(-1, 1)).backward()
gradients = torch.cat(seen)
exponents = gradients[gradients != 0].abs().log2()
lost = (exponents < -25).float().mean().item()  # rounded to zero: less than half of the smallest
small = ((exponents >= -25) & (exponents < -14)).float().mean().item()
print(f"zero in float16: {lost:.1%}, with fewer digits (subnormal): {small:.1%}")
print(f"times 2^12: zero {(exponents + 12 < -25).float().mean().item():.2%}, infinite {(exponents + 12 > 16).sum()}")

# %%
figure, axes = plt.subplots(figsize=(8, 3))
bins = range(-40, 20)
axes.hist(exponents.clamp(min=-40).numpy(), bins=bins, color=BLUE, hatch="//", edgecolor="white", label="gradients")
axes.hist((exponents + 12).numpy(), bins=bins, histtype="step", color=ORANGE, linewidth=2, label="times 2¹²")
for x, name in ((-24, "smallest"), (-14, "smallest normal"), (16, "largest")):
    axes.axvline(x, color="black", linestyle="--")
    axes.annotate(name, (x, axes.get_ylim()[1] * 0.93), xytext=(3, 0), textcoords="offset points", fontsize=8)
axes.set(xlabel="log₂ |gradient|", ylabel="how many")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# *Two histograms over powers of two: gradients, filled, lie left of float16's smallest normal number, 2⁻¹⁴, and a part of
# them left of its smallest, 2⁻²⁴; scaled by 2¹², an outline of the same shape twelve steps to the right, they lie
# around and above the smallest normal, and well below the largest, 65,504 or nearly 2¹⁶.*

# %% [markdown]
# ## Memory over a step
# What is alive after every allocation, by the phase it was made in; parameters left out. Above as it comes, below with
# every block checkpointed by yours.

# %%
from dataclasses import asdict
from lab.measure.memory import Memory
from lab.plots.memory import memory_timeline
from tests.mixed_precision import probes_memory

sizes, pictures = asdict(SIZES["tiny"]) | {"layers": 6, "width": 128, "hidden": 344}, []
figure, both = plt.subplots(2, 1, figsize=(8, 6), sharey=True)
for axes, checkpointed in zip(both, (False, True)):
    got = ask(probes_memory.timeline, sizes, 8, 128, checkpointed)
    if got:
        memory = Memory(peak_bytes=got["peak"], events=[tuple(e) for e in got["events"]])
        pictures.append(memory_timeline(axes, memory, "checkpointed" if checkpointed else "plain"))
figure.tight_layout()
plt.show()

# %%
for picture in pictures:
    print(picture.alt, picture.table, "", sep="\n")

# %% [markdown]
# *Two pictures of areas. In the upper one the area of forward grows to the end of forward, and falls in backward as
# gradients, the second area, grow. In the lower one forward hardly grows; backward rises and falls once for each block,
# as it is computed again.*
