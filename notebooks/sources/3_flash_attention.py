# %% [markdown]
# # 3 · FlashAttention-2: how can attention work without its matrix?
# Attention with N queries and N keys has N × N scores. At N = 65,536 that matrix has 8.6 GB for each head, in 16 bits. Yet
# GPUs run attention at this length every day. In this notebook you build the trick: a softmax over scores that arrive in
# pieces, of which none is kept.
#
# You write one function of about eight lines, `fold`. Chapter: [FlashAttention-2](../handout/flash_attention.md).

# %% [markdown]
# ## The matrix is what costs
# Plain attention for one head, written as in a textbook. `meter` counts the bytes that torch allocates, and is exact on any
# machine.
#
# **Predict.** N doubles from row to row. By what factor does the memory grow?

# %%
from lab.measure.memory import meter

DIM = 64

def plain(q, k, v):
    s = q @ k.mT / math.sqrt(DIM)  # (queries, keys)
    return s.softmax(dim=-1) @ v  # (queries, dim)

lengths = [256, 512, 1024, 2048]
whole = []
for n in lengths:
    q = k = v = torch.randn(n, DIM)
    with meter(inputs=(q,)) as measured:
        plain(q, k, v)
    whole.append(measured.peak_bytes / 2**20)
    print(f"N = {n:5}: the output has {n * DIM * 4 / 2**20:5.2f} MiB, the peak is {whole[-1]:6.2f} MiB")

# %% [markdown]
# Four times, for each doubling: the peak is two matrices of N × N, the scores and their softmax. The output grows only
# twofold. So the question is whether a row of scores can be used up before the next scores are computed.
#
# ## Softmax wants the whole row
# Softmax of a row of scores s is exp(s) divided by the sum of exp(s). Scores can be large, and exp overflows early.
#
# **Predict.** What does the first line below print? And the second, which subtracts the maximum first?

# %%
s = torch.tensor([1000.0, 1001.0])
print("exp(s) / sum:        ", s.exp() / s.exp().sum())
print("exp(s − max) / sum:  ", (s - s.max()).exp() / (s - s.max()).exp().sum())

# %% [markdown]
# Subtracting the maximum changes nothing in exact arithmetic, since numerator and denominator shrink by the same factor.
# It keeps every exponent at or below 0. But the maximum of a row is known only at its end. That is the obstacle.
#
# ## Take back what was too large
# Keep two numbers for each row: the maximum m so far, and l, the sum of exp(s − m) so far. Suppose a larger maximum m′
# arrives. Every term of l was exp(s − m) and should be exp(s − m′). The correction is one factor for all of them:
#
# exp(s − m′) = exp(s − m) · exp(m − m′)
#
# So it is enough to multiply l by α = exp(m − m′). The old scores are not needed again.
#
# By hand: the scores ln 1, ln 4 give m = ln 4 and l = 1/4 + 1 = 5/4. Now ln 2, ln 8 arrive. The new maximum is ln 8, so
# α = 4/8, and l = 1/2 · 5/4 + 2/8 + 1 = 15/8.
#
# ## Carry the output along
# The output of a query is an average of the values v, weighted by softmax. It needs a third running number: acc, the sum of
# exp(s − m) · v. When m rises, acc shrinks by the same α as l. At the end, the output is acc / l.
#
# By hand: let the first two scores have the values 1 and 2. Then acc = 1/4 · 1 + 1 · 2 = 9/4. The next two have the values
# 3 and 1, so acc = 1/2 · 9/4 + 2/8 · 3 + 1 · 1 = 23/8. The output is 23/8 divided by 15/8.
#
# **Your turn.** Write `fold`. It takes m, l and acc of all scores so far, a list of new scores and a list of their values. It
# returns all three, up to date. Before the first scores m is −∞, l and acc are 0; `math.exp(-math.inf)` is 0.

# %%
def fold(m, l, acc, scores, values):
    """Maximum, sum and weighted sum of values after some more scores, as (m, l, acc)."""
    ...

# %%
ln = math.log
written = check(
    fold,
    [
        ((-math.inf, 0.0, 0.0, [ln(1), ln(4)], [1.0, 2.0]), (ln(4), 5 / 4, 9 / 4)),
        ((ln(4), 5 / 4, 9 / 4, [ln(2), ln(8)], [3.0, 1.0]), (ln(8), 15 / 8, 23 / 8)),
        ((ln(8), 15 / 8, 23 / 8, [ln(4)], [2.0]), (ln(8), 19 / 8, 31 / 8)),
        ((-math.inf, 0.0, 0.0, [1000.0, 1000.0], [1.0, 3.0]), (1000.0, 2.0, 4.0)),
    ],
    "Find the new maximum first. Then every exponent, those of the old sums too, is taken relative to it.",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def fold(m, l, acc, scores, values):
#     """Maximum, sum and weighted sum of values after some more scores, as (m, l, acc)."""
#     larger = max(m, *scores)
#     shrink = math.exp(m - larger)
#     l, acc = shrink * l, shrink * acc
#     for score, value in zip(scores, values):
#         weight = math.exp(score - larger)
#         l += weight
#         acc += weight * value
#     return larger, l, acc
# ```
# </details>
#
# If yours is not right yet, the notebook goes on with the logarithm of the sum, which is another way to the same numbers.

# %%
def slowly(m, l, acc, scores, values):
    old = [(m + ln(l), acc / l)] if l else []  # all that came before, as one score with one value
    s, v = torch.tensor([*old, *zip(scores, values)], dtype=torch.float64).T
    top = max(m, *scores)
    l = math.exp(s.logsumexp(0).item() - top)
    return top, l, l * (s.softmax(0) @ v).item()

step = fold if written else slowly

# %% [markdown]
# ## Watch m and l
# One query against 512 keys, 64 at a time. A value is a vector; `fold` carries its first number.
#
# **Predict.** m can only rise. Can l fall?

# %%
torch.manual_seed(3)
q, k, v = torch.randn(3, 512, DIM, dtype=torch.float64)
q = 2 * q  # so that scores spread out
tiles = (k @ q[0] / math.sqrt(DIM)).split(64)

m, l, acc, ms, ls = -math.inf, 0.0, 0.0, [], []
for tile, values in zip(tiles, v[:, 0].split(64)):
    m, l, acc = step(m, l, acc, tile.tolist(), values.tolist())
    ms.append(m), ls.append(l)
seen = range(1, len(tiles) + 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(5.6, 2.8))
left.step(seen, ms, where="post", marker="o", color=BLUE), left.set(title="maximum m", xlabel="tiles seen")
right.plot(seen, ls, "s-", color=ORANGE), right.set(title="sum l", xlabel="tiles seen", ylim=(0, None))
plt.show()
print("m:", *(f"{x:6.2f}" for x in ms))
print("l:", *(f"{x:6.2f}" for x in ls))
print(f"m + ln l = {m + ln(l):.12f}, torch.logsumexp = {torch.cat(tiles).logsumexp(0):.12f}")
print(f"acc / l  = {acc / l:.12f}, plain attention = {plain(q[:1], k, v)[0, 0]:.12f}")

# %% [markdown]
# **Figure 1.** m and l of one query. Look at where the left curve takes a step up: there the right one falls, or grows
# less, because all older terms shrink.
#
# ## From numbers to vectors
# Values are vectors, so acc is a vector too. The next cell has one query at a time, with m, l and acc and one tile of
# scores. It is your loop, written with products of tensors.

# %%
def one_query(q, k, v, tile=64, rescale=True):
    """Attention of one query, a vector of DIM numbers, over all keys."""
    m, l, acc = torch.tensor(-math.inf, dtype=q.dtype), 0.0, torch.zeros_like(q)
    for keys, values in zip(k.split(tile), v.split(tile)):
        scores = keys @ q / math.sqrt(DIM)  # (tile,): all that exists of the matrix
        top = torch.maximum(m, scores.max())
        weights = (scores - top).exp()
        shrink = (m - top).exp() if rescale else 1.0
        l, acc, m = shrink * l + weights.sum(), shrink * acc + weights @ values, top
    return acc / l

want = plain(q, k, v)
for tile in (1, 7, 64, 512):
    print(f"tiles of {tile:3} keys: off by {(one_query(q[0], k, v, tile) - want[0]).abs().max():.1e}")
print(f"without rescaling:  off by {(one_query(q[0], k, v, rescale=False) - want[0]).abs().max():.1e}")

# %% [markdown]
# The result is exact whatever the tiles are, up to the rounding of float64. Nothing is approximated.
#
# **Change.** Without rescaling, try `tile=512`: the error is gone. Why? There is only one tile, so m never changes after it
# was first set. Tests with one tile would not find that bug.
#
# A GPU takes 64 or 128 queries at once, because the product of two tiles keeps its tensor cores busy. Queries share
# nothing, so nothing else changes.
#
# ## What the memory is now

# %%
tiled = []
for n in lengths:
    many = torch.randn(n, DIM)
    with meter(inputs=(many,)) as measured:
        out = torch.empty_like(many)
        for i in range(0, n, n // 8):  # some queries stand for all: each uses the same memory again
            out[i] = one_query(many[i], many, many)
    tiled.append(measured.peak_bytes / 2**20)
plt.plot(lengths, whole, "s--", color=ORANGE, label="whole matrix")
plt.plot(lengths, tiled, "o-", color=BLUE, label="tile after tile")
plt.xscale("log", base=2), plt.yscale("log"), plt.xticks(lengths, lengths)
plt.xlabel("N"), plt.ylabel("peak, MiB"), plt.legend()
plt.show()
for n, a, b in zip(lengths, whole, tiled):
    print(f"N = {n:5}: {a:6.2f} MiB as a whole, {b:5.2f} MiB in tiles")

# %% [markdown]
# **Figure 2.** Peak memory over N (measured). Look at the slopes: four times for each doubling above, twice below. The lower
# curve is nearly the output alone.
#
# ## A causal mask leaves tiles out
# In a language model query i may see keys 0 to i. A tile of which every key lies after every query needs no work.
#
# **Predict.** With 8 × 8 tiles, what share of them is left out? And with 64 × 64?

# %%
def kind(i, j):
    """Of the tile with queries i·64 … i·64 + 63 and the same for keys j: 0 skipped, 1 masked in part, 2 whole."""
    return 0 if j > i else 1 if j == i else 2

grid = [[kind(i, j) for j in range(8)] for i in range(8)]
for row in grid:
    print(" ".join("·◩■"[kind] for kind in row))
for n in (8, 64):
    work = sum(kind(i, j) > 0 for i in range(n) for j in range(n))
    print(f"{n:2} × {n:2} tiles: {work} of {n * n} are computed, {work / n / n:.0%}")

# %% [markdown]
# ■ is a whole tile, ◩ is cut by the diagonal and needs a mask, and · is never loaded. The share nears one half as tiles get
# small beside N. Masking the scores of skipped tiles instead would give the same numbers for twice the work.
#
# ## Is it faster, too?
# The FLOPs are the same. What changes is the traffic with memory. *Intensity* is FLOPs for each byte that moves. An H100
# needs 295 FLOPs a byte to keep its arithmetic busy: below that, memory sets the pace.

# %%
PEAK, BANDWIDTH = 989.4e12, 3.35e12  # H100: FLOP/s in bfloat16, bytes/s
N, HEADS, WIDE = 8192, 16, 128
flops = 4 * HEADS * N * N * WIDE
once = HEADS * N * (4 * WIDE * 2 + 4)  # q, k, v and o in 16 bits, lse in 32
again = HEADS * N * 2 * WIDE * 2 * (N // 128 - 1)  # k and v once for each of N / 128 tiles of queries
moved = {
    "plain": HEADS * (4 * N * N * 2 + 4 * N * WIDE * 2),  # scores and softmax, each written and read
    "flash, no cache": once + again,
    "flash, all repeats from L2": once,
}
print(f"the ridge is at {PEAK / BANDWIDTH:.0f} FLOPs a byte")
xs = [20, PEAK / BANDWIDTH, 8000]
plt.plot(xs, [min(PEAK, x * BANDWIDTH) / 1e12 for x in xs], color=INK)
for (name, size), mark, colour in zip(moved.items(), "soD", (ORANGE, BLUE, GREEN)):
    x = flops / size
    roof = min(PEAK, x * BANDWIDTH)
    plt.plot(x, roof / 1e12, mark, color=colour, markersize=9, label=name)
    bound = "arithmetic" if x > PEAK / BANDWIDTH else "memory"
    print(f"{name:27} {x:5.0f} FLOPs a byte: at most {roof / 1e12:3.0f} TFLOP/s, bound by {bound}")
plt.xscale("log"), plt.yscale("log"), plt.legend(loc="lower right")
plt.xlabel("FLOPs a byte"), plt.ylabel("TFLOP/s, at most")
plt.show()

# %% [markdown]
# **Figure 3.** The roof of an H100 with forward attention at N = 8,192 under it (computed). Look at which side of the
# corner a mark lies. If every tile of k and v came from device memory, flash attention would still be bound by memory. In
# truth the programs of a head read the same k and v at about the same time, so most reads come from the L2 cache. The
# kernel then lies between the circle and the diamond, the nearer to the diamond the more the cache serves.
#
# **Change.** Set `N` to 1,024, or tiles of 128 queries to 64. Which mark moves, and which stays?
#
# **Next:** the same for tiles of tensors, with half precision and masked rows: `lab check flash_attention.online_softmax`.
