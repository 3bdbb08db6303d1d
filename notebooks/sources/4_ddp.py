# %% [markdown]
# # 4 · Data parallelism: what is sent, and when
# Ranks on this machine train a small transformer. The *ledger* of the process group says what each sent; a *link* makes
# every message cost latency and bandwidth, as on a network. First what the simplest wrapper sends in one step.

# %%
from collections import Counter
from lab.plots.timeline import Span, spans, timelines
from lab.cluster.costs import Link
from tests.ddp import probes_timeline as probes

sizes = {"layers": 3, "width": 96, "heads": 4, "kv_heads": 4, "hidden": 256, "context": 64}
KINDS = {"naive": {}, "flat": {}, "overlapped": {}, "bucketed": {"bucket_bytes": 400_000}}
link = Link(alpha_s=1e-3, bytes_per_s=100e6)
steps = {kind: ask(probes.step, kind, sizes, 4, options, world=2, link=link) for kind, options in KINDS.items()}
for kind, ranks in steps.items():
    if ranks:
        rows = [r for r in ranks[0]["rows"] if r["op"] == "all_reduce"]
        phases = ", ".join(f"{n} in {phase}" for phase, n in Counter(r["phase"] for r in rows).items())
        cost = sum(link.cost_s("all_reduce", r["bytes"], 2) for r in rows)
        print(f"{kind:<11} {len(rows):>3} all-reduces ({phases}), {sum(r['bytes'] for r in rows):>9,} bytes, "
              f"{1e3 * cost:.0f} ms on this link")

# %% [markdown]
# The same bytes each time. What differs is how many messages they make, each of which pays the latency twice on two ranks,
# and when they leave. One step of each wrapper, all on one axis of time:

# %%
panels = {
    kind: spans([r["rows"] for r in ranks], [[Span(*s) for s in r["compute"]] for r in ranks])
    for kind, ranks in steps.items() if ranks
}
if panels:
    figure, pictures = timelines(panels)
    plt.show()
    for picture in pictures.values():
        print(picture.alt)

# %% [markdown]
# *Four panels, two ranks each: forward, backward and the optimizer's step above, messages below.* In **naive** and **flat**
# the lower row begins where backward ends. In **overlapped** it begins soon after backward does, but dozens of small
# messages pay the latency one after the other and run on long after it. In **bucketed** few messages leave while
# backward goes on, and only the last sticks out.
#
# What is computed does not change. Four ranks, thirty steps on the bytes of this kit's handout, each wrapper:

# %%
import torch

text = torch.tensor(list((ROOT / "handout" / "ddp.md").read_bytes()))
starts = torch.randint(len(text) - 65, (30, 8), generator=torch.Generator().manual_seed(0))
tokens = text[starts[..., None] + torch.arange(65)]
small = {**sizes, "layers": 2, "width": 64, "hidden": 128}
curves = {kind: ask(probes.losses, kind, small, tokens, options, world=4) for kind, options in KINDS.items()}
curves = {kind: ranks[0] for kind, ranks in curves.items() if ranks}
figure, axes = plt.subplots(figsize=(6, 3))
for (kind, losses), style, colour in zip(curves.items(), ("-", "--", "-.", ":"), (BLUE, ORANGE, GREEN, "black")):
    axes.plot(losses, style, color=colour, label=kind, linewidth=3)
axes.set(xlabel="step", ylabel="loss, nats a byte")
if curves:
    axes.legend()
    plt.show()
    first = next(iter(curves.values()))
    for kind, losses in curves.items():
        print(f"{kind:<11} last loss {losses[-1]:.6f}, farthest from {next(iter(curves))}: "
              f"{max(abs(a - b) for a, b in zip(losses, first)):.1e}")

# %% [markdown]
# *Four curves that lie on one another, from 5.6 down.* Sums in another order differ in the last bits, and no more. So
# the loss says nothing of how a wrapper sends: that is why its exercises are judged by the ledger and the clock too.
