# %% [markdown]
# # 3 · FlashAttention-2: what never exists
# Memory of attention with the whole matrix, and by tiles, as N grows. Both are metered under torch's dispatcher: exact
# on any machine.

# %%
import torch
from lab.measure.memory import meter
from tests.flash_attention import probes

lengths, naive, tiled = [256, 512, 1024, 2048], [], []
for n in lengths:
    q = k = v = torch.randn(1, n, 64)
    with meter(inputs=(q,)) as measured:
        (q @ k.mT / 8).softmax(-1) @ v
    naive.append(measured.peak_bytes / 2**20)
    got = ask(probes.memory, q, k, v, False)
    tiled.append(got["peak_bytes"] / 2**20 if got else float("nan"))
for row in zip(lengths, naive, tiled):
    print("N = {:5d}: whole matrix {:7.2f} MiB, by tiles {:5.2f} MiB".format(*row))

# %%
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(lengths, naive, marker="s", color=ORANGE, label="whole matrix: grows with N²")
axes.plot(lengths, tiled, marker="o", color=BLUE, label="by tiles: grows with N")
axes.set(xscale="log", yscale="log", xlabel="N", ylabel="peak, MiB", xticks=lengths, xticklabels=lengths)
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# *Two lines on logarithmic axes: the upper one, the whole matrix, rises four times for each doubling of N; the lower
# one, by tiles, at most twice.* The numbers are printed above it.

# %% [markdown]
# ## The running maximum and sum
# Four queries against 512 keys in eight tiles. After each tile: the maximum m, which rises in steps, and the sum l,
# which is rescaled each time it does.

# %%
from tests.flash_attention import probes_steps

torch.manual_seed(1)
tiles = [torch.randn(4, 64) * 2 for _ in range(8)]
after = ask(probes_steps.softmax_statistics, [{"tiles": tiles[: i + 1]} for i in range(8)])
if after:
    m = torch.stack([a["maximum"] for a in after])
    l = torch.stack([a["normaliser"] for a in after])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    for row, (mark, colour) in enumerate(zip("os^D", (BLUE, ORANGE, GREEN, "#CC79A7"))):
        left.step(range(1, 9), m[:, row], where="post", marker=mark, markersize=4, color=colour, label=f"query {row}")
        right.plot(range(1, 9), l[:, row], marker=mark, markersize=4, color=colour)
    left.set(title="m", xlabel="tiles seen"), right.set(title="l", xlabel="tiles seen")
    left.legend()
    plt.show()
    print("query 0, m:", *(f"{x:.2f}" for x in m[:, 0]))
    print("query 0, l:", *(f"{x:.2f}" for x in l[:, 0]))
    whole = torch.cat(tiles, -1)[0].logsumexp(0)
    print(f"lse = m + ln l = {after[-1]['lse'][0]:.6f}, torch.logsumexp = {whole:.6f}")

# %% [markdown]
# *Left, four staircases that only rise. Right, four lines that rise with each tile and drop where the maximum of their
# query rose.*

# %% [markdown]
# ## Which tiles the kernel visits
# The fused kernel in Triton's interpreter. Every load of k is recorded by address, so this is what the kernel does, not
# what it should: a dot for each tile of keys that a tile of queries loads, with a causal mask and without.

# %%
from tests.flash_attention import probes_kernels

q, k, v = (torch.randn(1, 1, 1024, 16).half() for _ in range(3))
seen = {c: ask(probes_kernels.forward, q, k, v, c, "", "interpret", True, timeout=120) for c in (False, True)}
if all(seen.values()):
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.5))
    for panel, (is_causal, got) in zip(panels, seen.items()):
        first = {tuple(p): rows[0] for p, _, rows in got["stores"]}
        x = [rows[0] for *_, rows in got["loads"]]
        y = [first[tuple(p)] for p, *_ in got["loads"]]
        panel.plot(x, y, "s", markersize=9, color=BLUE, markeredgecolor="white")
        panel.set(title="causal" if is_causal else "full", xlabel="first key of the tile", ylabel="first query")
        panel.set(xlim=(-64, 1024), ylim=(1024, -64))
        print(f"{'causal' if is_causal else 'full':6}: {len(x)} tiles of k are loaded")
    figure.tight_layout()
    plt.show()

# %% [markdown]
# *Left, a full square of marks. Right, a staircase: nothing above the diagonal.*

# %% [markdown]
# ## The roofline
# What attention costs at dim 128, 16 heads, in bfloat16, forward, on an H100: 989 TFLOP/s and 3.35 TB/s.

# %%
peak, bandwidth = 989e12, 3.35e12
shared = {"batch": 1, "heads": 16, "dim": 128, "direction": "forward"}
cases = [{**shared, "queries": n, "keys": n} for n in (1024, 2048, 4096, 8192)]
cost = {name: ask(probes_steps.costs, [{**c, "algorithm": name} for c in cases]) for name in ("naive", "flash")}
if all(cost.values()):
    figure, axes = plt.subplots(figsize=(6, 3.5))
    ridge = peak / bandwidth
    axes.plot([20, ridge, 1000], [20 * bandwidth / 1e12, peak / 1e12, peak / 1e12], color="black")
    for name, mark, colour in (("naive", "s", ORANGE), ("flash", "o", BLUE)):
        x = [c["intensity"] for c in cost[name]]
        axes.plot(x, [min(peak, i * bandwidth) / 1e12 for i in x], mark, color=colour, label=name, markersize=8)
        print(f"{name}: FLOPs a byte at N = 1k, 2k, 4k, 8k:", *(f"{i:.0f}" for i in x))
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s, at most")
    axes.legend()
    plt.show()

# %% [markdown]
# *A line that rises to the ridge at 295 FLOPs a byte. Naive attention lies at 57 to 63 whatever N is: every score is
# written and read. Flash attention with tiles of 128 queries lies at 114 to 126, if k and v came from memory each time;
# in truth the programs of one head read them from the L2 cache, and the kernel is bound by arithmetic.*
