# %% [markdown]
# # 6 · A 4D mesh: four cuts, one model
# Sixteen ranks as data × pipe × expert × tensor, 2 of each. The same ranks, once for each axis: those of one colour
# and hatch talk with each other.

# %%
from IPython.display import Markdown
from lab.plots import mesh as plots_mesh, schedule as plots_schedule, losses as plots_losses
from notebooks import probes

groups = ask(probes.mesh_groups, {"data": 2, "pipe": 2, "expert": 2, "tensor": 2})
if groups:
    figure, panels = plt.subplots(1, 4, figsize=(9, 2.4), dpi=60)
    picture = plots_mesh.mesh(panels, groups, columns=4)
    figure.tight_layout()
    plt.show()
    display(Markdown(picture.table))

# %% [markdown]
# *Tensor groups are pairs of neighbours, 0 and 1, 2 and 3. Data groups pair the upper half with the lower, 0 with 8: they meet
# once a step, and may be far apart.*
#
# ## Schedules
# Four stages, eight micro-batches; a backward takes as long as two forwards. White is waiting.

# %%
from lab.cluster.schedule import Action, check

actions = ask(probes.schedules, 4, 8, 2)
if actions:
    figure, panels = plt.subplots(3, 1, figsize=(8, 5), dpi=60)
    played = {}
    for panel, (name, ranks) in zip(panels, actions.items()):
        chunks = 2 if name == "interleaved" else 1
        ranks = [[Action(*a) for a in rank] for rank in ranks]
        # A chunk of two has half of a stage's layers: its forward takes half as long.
        played[name] = check(ranks, 8, chunks, forward=1 / chunks, backward=2 / chunks)
        plots_schedule.schedule(panel, played[name], name, end=36)
    figure.tight_layout()
    plt.show()
    for name, s in played.items():
        print(f"{name:12} idle / busy {s.bubble:.3f}   activations kept, by rank: {s.live}")

# %% [markdown]
# *Three bands of four rows. GPipe: forwards run down like stairs, then backwards run up; each rank keeps all eight activations.
# 1F1B: as much white, but from the middle on forward and backward take turns, and rank r keeps 4 − r. Interleaved: half of
# the white, for twice as many messages.* Idle over busy time is (p − 1)/m = 3/8, and with v = 2 chunks 3/16.
#
# ## Eight meshes, one curve
# A transformer of four layers with four experts in each, on this book's own bytes: eight meshes of up to 16 ranks,
# the same batches, AdamW.

# %%
steps, texts = 12, str(ROOT / "handout")
meshes = {
    "one rank": ({}, {}),
    "data=2, sharded": ({"data": 2}, {"fsdp": True, "small": 0}),
    "tensor=2, sequence": ({"tensor": 2}, {"sequence": True}),
    "pipe=4, 1F1B": ({"pipe": 4}, {"micro_batches": 1}),
    "pipe=2, interleaved": ({"pipe": 2}, {"schedule": "interleaved", "chunks": 2, "micro_batches": 1}),
    "expert=4": ({"expert": 4}, {}),
    "data=2 × expert=2 × tensor=2": ({"data": 2, "expert": 2, "tensor": 2}, {}),
    "2 × 2 × 2 × 2": ({"data": 2, "pipe": 2, "expert": 2, "tensor": 2}, {}),
}
runs = {}
for name, (degrees, plan) in meshes.items():
    plan = {"micro_batches": 1, **plan}
    if plan.get("chunks"):
        plan["micro_batches"] = 2  # it goes round in groups of as many as there are stages
    world = 1
    for degree in degrees.values():
        world *= degree
    ranks = ask(probes.mesh_run, degrees, plan, steps, texts, world=world)
    if ranks:
        runs[name] = ranks
if runs:
    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=70)
    plots_losses.losses(axes, {name: ranks[0]["losses"] for name, ranks in runs.items()})
    axes.legend(ncols=2, fontsize=8)
    plt.show()
    alone = runs["one rank"][0]["losses"]
    for name, ranks in runs.items():
        off = max(abs(a - b) / b for a, b in zip(ranks[0]["losses"], alone))
        print(f"{name:30} {len(ranks):2} ranks: {alone[0]:.4f} → {ranks[0]['losses'][-1]:.4f}, off by {off:.1e}")

# %% [markdown]
# *Eight curves of which one is seen: they lie on each other.* What they are off by is rounding, which may send a token to
# another expert, and with two micro-batches the balancing loss, which is then a mean over two halves of the batch.
#
# ## Bytes by axis
# What one rank of the mesh with 16 sent in a step, from the ledger, beside what the accounting says.

# %%
name = "2 × 2 × 2 × 2"
degrees, plan = meshes[name]
said = ask(probes.mesh_cost, degrees, plan)
if said and name in runs:
    axes_of = {}
    for axis, groups_of in groups.items():
        axes_of |= {" ".join(map(str, g)): axis for g in groups_of if 0 in g}
    both = sorted(r for g in groups["data"] for r in g if set(g) & set(next(x for x in groups["expert"] if 0 in x)))
    axes_of[" ".join(map(str, both))] = "data×expert"
    sent = {axes_of[g]: b for g, b in runs[name][0]["sent"].items() if g in axes_of}
    figure, axes = plt.subplots(figsize=(8, 3))
    for place, axis in enumerate(said):
        axes.bar(place - 0.2, sent.get(axis, 0) / 1024, 0.38, color=BLUE, label="ledger" if not place else None)
        axes.bar(place + 0.2, said[axis] / 1024, 0.38, color=ORANGE, hatch="///", edgecolor="white",
                 label="accounting" if not place else None)
        print(f"{axis:12} ledger {sent.get(axis, 0):10,.0f}   accounting {said[axis]:10,.0f}")
    axes.set(xticks=range(len(said)), xticklabels=list(said), ylabel="KiB a step, rank 0")
    axes.legend()
    plt.show()

# %% [markdown]
# *Five pairs of bars, of equal height but for expert: the accounting has a routing that is even. Most goes over data, where
# experts' gradients are summed, least over pipe. Were the model wider by ten, data's bar would be a hundred times as high, tensor's ten.*
#
# ## Expert load
# Tokens that each expert was given in the last step; the balancing loss has had twelve steps to even them out.

# %%
if "expert=4" in runs:
    import re
    loads = {}
    for rank, said in enumerate(runs["expert=4"]):
        for module, counts in said["loads"]:
            layer = int(re.search(r"blocks\.(\d+)", module)[1])
            loads.setdefault(layer, {})[rank] = counts[0]
    figure, panels = plt.subplots(1, len(loads), figsize=(9, 2.4), sharey=True, dpi=60)
    for panel, (layer, by_expert) in zip(panels, sorted(loads.items())):
        panel.bar(list(by_expert), list(by_expert.values()), color=GREEN, hatch="...", edgecolor="white")
        even = sum(by_expert.values()) / len(by_expert)
        panel.axhline(even, color="black", linestyle="--", linewidth=0.8)
        panel.set(title=f"layer {layer}", xlabel="expert", xticks=list(by_expert))
        print(f"layer {layer}: {list(by_expert.values())}, even would be {even:.0f}")
    panels[0].set(ylabel="tokens")
    figure.tight_layout()
    plt.show()

# %% [markdown]
# *Four panels of four bars around a dashed line, some above, some below. All of a layer's bars together are the batch's
# tokens, twice: each goes to two experts.*
