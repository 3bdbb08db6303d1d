# %% [markdown]
# # 5 · ZeRO: who keeps what
# AdamW on a tiny transformer in float32: the bytes that a rank holds after a step, at 1, 2, 4 and 8 ranks, beside what
# the formulas say. Measured: the sizes of parameters, gradients and moments, and, as a check that nothing is hidden, of
# every storage that torch's operations have met.

# %%
from notebooks import probes
from tests.zero import probes_accounting, probes_state

names = {"none": "data parallel", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
kinds, worlds = ("parameters", "gradients", "optimizer"), (1, 2, 4, 8)
held, formula = {}, {}
for method in probes.STAGES:
    for world in worlds:
        ranks = ask(probes.bytes_by_kind, method, world=world)
        if ranks is None:
            break
        fullest = max(ranks, key=lambda rank: rank["optimizer"])
        held[method, world] = {kind: fullest[kind] / 2**10 for kind in (*kinds, "else")}
        counted = ask(probes_accounting.counted, fullest["sizes"], world, method, "float32", 0, 1)
        formula[method, world] = counted and {kind: counted[kind] / 2**10 for kind in kinds}
if held:
    print("KiB on the fullest rank: measured, (formula)")
    print(f"{'':13} ranks  {'parameters':>16} {'gradients':>16} {'optimizer':>16} {'else':>6}")
for (method, world), mine in held.items():
    said = formula[method, world] or dict.fromkeys(kinds, float("nan"))
    each = " ".join(f"{mine[k]:7.1f} ({said[k]:6.1f})" for k in kinds)
    print(f"{names[method]:13} {world:5}  {each} {mine['else']:6.1f}")

# %%
figure, panels = plt.subplots(1, 4, figsize=(11, 3.2), sharey=True)
looks = {"parameters": (BLUE, ""), "gradients": (ORANGE, "///"), "optimizer": (GREEN, "...")}
for panel, method in zip(panels, probes.STAGES):
    mine = [held[method, world] for world in worlds if (method, world) in held]
    below = [0.0] * len(mine)
    for kind in kinds:
        high = [m[kind] for m in mine]
        panel.bar(range(len(mine)), high, bottom=below, width=0.7, color=looks[kind][0], hatch=looks[kind][1],
                  edgecolor="white", label=kind)
        below = [b + h for b, h in zip(below, high)]
    said = [formula.get((method, world)) for world in worlds[: len(mine)]]
    panel.plot([i for i, f in enumerate(said) if f], [sum(f.values()) for f in said if f], "k_",
               markersize=30, markeredgewidth=1.5, label="formula, all three")
    panel.set(title=names[method], xlabel="ranks", xticks=range(4), xticklabels=worlds)
panels[0].set(ylabel="KiB a rank")
if held:
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
figure.tight_layout(rect=(0, 0, 1, 0.92))
plt.show()

# %% [markdown]
# *Four panels of four stacked bars, a black line at the formula's height on each. Data parallel: all bars are as high,
# half of each the optimizer's. ZeRO-1: the optimizer's part halves with each doubling of ranks, nearly, since tensors stay
# whole. ZeRO-2: the gradients' part too. ZeRO-3: all three, so that the bar of 8 ranks is an eighth of the first.* The
# numbers are printed above it. What is `else` is tokens, RoPE's tables and AdamW's counts of steps.

# %% [markdown]
# ## Going on with another number of ranks
# Eight steps on 2 ranks, a checkpoint, eight on 4, a checkpoint, eight on 3; and all 24 in one process that is never
# interrupted.

# %%
import torch

torch.manual_seed(0)
width, options, x = 8, {"lr": 0.02, "weight_decay": 0.1}, torch.randn(16, 8)
state = dict(probes_state.Model(width).state_dict())
batches = [[x] * 8 for _ in range(3)]
stages = [[[0, 1], False], [[0, 1, 2, 3], False], [[1, 2, 3], True]]
whole = ask(probes_state.oracle, width, "AdamW", options, state, batches)
ranks = ask(probes_state.resume, width, "AdamW", options, state, batches, stages, world=4)
if ranks:
    figure, axes = plt.subplots(figsize=(8, 3))
    axes.plot(range(24), sum(whole["losses"], []), color="black", linewidth=1, label="never interrupted")
    for i, ((members, _), mark, colour) in enumerate(zip(stages, "os^", (BLUE, ORANGE, GREEN))):
        losses = ranks[members[0]]["losses"][i]
        axes.plot(range(8 * i, 8 * i + 8), losses, mark, color=colour, label=f"{len(members)} ranks")
        off = max(abs(a - b) for a, b in zip(losses, whole["losses"][i]))
        files = ranks[members[0]]["files"][i]
        print(f"{len(members)} ranks: losses {losses[0]:.4f} … {losses[-1]:.4f}, off by {off:g}; then saved as",
              ", ".join(f"{name} ({size:,} B)" for name, size, _ in files))
    for step in (7.5, 15.5):
        axes.axvline(step, color="0.7", linestyle="--", linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(ncols=4, fontsize=8)
    plt.show()

# %% [markdown]
# *A line that falls and then flattens, and on it, without a jump at the two dashed lines where the number of ranks changes,
# circles, squares and triangles.* The losses are equal to the last bit: state is saved by the parameters' names, and whoever owns a tensor
# now finds it.
