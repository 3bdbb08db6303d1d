"""Pictures of the chapter on FlashAttention-2. Their numbers are computed."""

from fractions import Fraction
from itertools import groupby

import torch
from torch import Tensor

from lab.cluster.hardware import cluster
from reference.flash_attention.accounting import accounting

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Chart, Lane, Picture, picture, spaced

H100 = cluster("dgx-h100", 8).device
SCORES = (1, 4, 2, 8)  # exponentials of the worked example's scores


@picture(392, "Plain attention writes and reads the score matrix; flash attention does not")
def traffic(p: Picture) -> None:
    n, dim = 8192, 128
    small, large = f"{2 * n * dim / 1e6:.0f} MB", f"{2 * n * n / 1e6:.0f} MB"
    p.words(16, 26, "Plain attention: three kernels", "ink bold")
    for y, location in ((80, "memory"), (154, "chip"), (276, "memory"), (340, "chip")):
        p.words(16, y, location, "soft")
    for x, (name, colour) in spaced((("q, k", GREEN), ("S", ORANGE), ("P", ORANGE), ("v, o", GREEN)), 86, 88):
        p.box(x, 60, 62, 32, colour, name, hatched=colour == ORANGE)
        p.words(x + 31, 52, large if colour == ORANGE else f"2 × {small}", "soft small", "middle")
    for x, name in spaced(("q kᵀ", "softmax", "P v"), 130, 88):
        p.box(x, 134, 62, 32, BLUE, name)
        p.line(x - 4, 94, x + 16, 130, arrow=True)
        p.line(x + 46, 130, x + 66, 94, arrow=True)
    p.line(392, 94, 372, 130, arrow=True)
    p.words(16, 192, f"The matrix crosses four times: {4 * 2 * n * n / 1e6:.0f} MB a head.", "soft")
    p.line(16, 210, 424, 210, dashed=True)
    p.words(16, 238, "Flash attention: one kernel", "ink bold")
    p.box(86, 256, 110, 32, GREEN, "q, k, v")
    p.box(302, 256, 110, 32, GREEN, "o, lse")
    p.box(86, 316, 326, 44, BLUE)
    p.words(100, 343, "a tile of S → P̃ → · v", "in")
    p.words(400, 343, "m, l, acc stay here", "in small", "end")
    p.line(141, 290, 141, 312, arrow=True)
    p.line(357, 312, 357, 290, arrow=True)
    p.words(16, 382, f"q, k, v and o cross: {4 * 2 * n * dim / 1e6:.0f} MB; k, v again from the cache.", "soft")


@picture(470, "Tiles of the causal score matrix, and what one tile of queries keeps")
def tiles(p: Picture) -> None:
    p.words(230, 24, "keys and values, a tile at a time →", "soft", "middle")
    side = 62
    for x, j in spaced(range(4), 120, side):
        p.box(x, 36, side - 4, 24, GREEN, f"k, v {j}")
    for y, i in spaced(range(4), 66, side):
        p.box(56, y, side - 4, side - 4, ORANGE, f"q {i}")
        for x, j in spaced(range(4), 120, side):
            colour, words = (BLUE, "all") if j < i else (YELLOW, "i ≥ j") if i == j else (None, "")
            p.box(x, y, side - 4, side - 4, colour, words)
    p.words(16, 340, "A tile of queries walks along its row and keeps", "ink bold")
    rows = (("m", 30, "the largest score so far"), ("l", 30, "the sum of exponentials"), ("acc", 110, "Σ P̃ v so far"))
    for y, (name, w, text) in spaced(rows, 352, 36):
        p.box(16, y, w, 28, BLUE, name)
        p.words(140, y + 19, text, "soft")


@picture(236, "Which warp has which scores, in version 1 and in version 2")
def warps(p: Picture) -> None:
    side = 144
    for x, by_keys in ((28, True), (252, False)):
        p.words(x, 26, "version 1: by keys" if by_keys else "version 2: by queries", "ink bold")
        for i, (along, colour) in enumerate(spaced((BLUE, GREEN, YELLOW, ORANGE), 0, side / 4)):
            across = side / 4 - 3
            box = (x + along, 44, across, side) if by_keys else (x, 44 + along, side, across)
            p.box(*box, colour, f"{i}")
        p.line(x - 8, 98, x + side + 8, 98, dashed=True)
        p.words(x, 212, "each row in 4 parts" if by_keys else "each row whole", "soft")


@picture(306, "Online softmax of four scores in two tiles: older weights shrink when m rises")
def online(p: Picture) -> None:
    """Bars are exp(score − m): each key's weight with the maximum so far."""
    first, largest = max(SCORES[:2]), max(SCORES)
    panels = (
        ("after tile 1", f"m = ln {first}", [e / first for e in SCORES[:2]]),
        ("m rises: × α", f"α = {first}/{largest}", [e / largest for e in SCORES[:2]]),
        ("after tile 2", f"m = ln {largest}", [e / largest for e in SCORES]),
    )
    for left, (title, rule, weights) in spaced(panels, 16, 140):
        p.words(left, 26, title, "ink bold")
        p.words(left, 46, rule, "soft")
        for j, (x, weight) in enumerate(spaced(weights, left, 31)):
            h = 150 * weight
            p.box(x, 226 - h, 27, h, BLUE if j < 2 else ORANGE)
            p.words(x + 13, 220 - h, str(Fraction(weight)), "ink small", "middle")
            p.words(x + 13, 243, f"ln {SCORES[j]}", "soft small", "middle")
        p.line(left, 226, left + 124, 226)
        p.words(left, 268, f"l = {Fraction(sum(weights))}", "ink bold")
    p.words(16, 294, "blue: scores of tile 1; orange: of tile 2", "soft")


@picture(190, "Ten numbers in blocks of four: three programs, and a mask for the last")
def programs(p: Picture) -> None:
    """Vector addition: one program per block, and a mask for the last block."""
    n, block = 10, 4
    for left, (i, colour) in spaced(enumerate((BLUE, ORANGE, GREEN)), 16, 140):
        p.words(left, 26, f"program {i}", "ink bold")
        p.words(left, 46, f"offs = {block * i} … {block * i + 3}", "soft")
        for x, index in spaced(range(block * i, block * (i + 1)), left, 32):
            p.box(x, 62, 28, 34, colour if index < n else None, str(index))
    p.line(16, 116, 16 + 140 * 2 + 60, 116)
    p.words(16, 138, "the tensor in memory ends here: n = 10", "soft")
    p.line(356, 116, 356, 100, arrow=True)
    p.words(16, 172, "dashed: offs < n is false, so nothing is read or written", "soft")


@picture(268, "Addresses of a tile of 2 × 4 in a matrix of 4 × 6 with stride_row 6")
def addresses(p: Picture) -> None:
    """A tile of addresses, from a range of row offsets and a range of column offsets."""
    rows, columns, block = 4, 6, (2, 4)
    p.words(16, 26, "x: 4 rows, 6 columns, stride_row = 6, stride_column = 1", "soft")
    for y, i in spaced(range(rows), 40, 36):
        p.words(16, y + 22, f"row {i}", "soft")
        for x, j in spaced(range(columns + 2), 70, 44):
            in_tile = i >= rows - block[0] and j >= 4
            if in_tile or j < columns:
                colour = None if j >= columns else ORANGE if in_tile else GREY
                p.box(x, y, 40, 32, colour, str(i * columns + j))
    p.words(16, 210, "offs_m = 2, 3   offs_n = 4, 5, 6, 7", "ink bold")
    p.words(16, 232, "address = x + offs_m[:, None] · 6 + offs_n[None, :]", "soft")
    p.words(16, 254, "18, 19 belong to row 3: the mask leaves them out.", "soft")


@picture(300, "Bytes kept for backward: the matrix grows with the square of the length")
def kept(p: Picture) -> None:
    """Bytes that a layer keeps for backward, as the context grows."""
    heads, dim = 16, 128
    lengths = [2**i for i in range(10, 18)]
    matrix = [(n, 2.0 * heads * n * n) for n in lengths]
    flash = [(n, heads * (4.0 * 2 * n * dim + 4 * n)) for n in lengths]
    c = Chart(p, (lengths[0], lengths[-1]), (1e7, 1e12))
    gigabytes = {1e7: "10 MB", 1e8: "100 MB", 1e9: "1 GB", 1e10: "10 GB", 1e11: "100 GB"}
    c.axes("tokens", "bytes kept for backward, one layer", {n: f"{n // 1024}k" for n in lengths}, gigabytes)
    memory = H100.hbm_bytes
    c.curve([(lengths[0], memory), (lengths[-1], memory)], GREY, dashed=True)
    c.label(lengths[0], memory, "an H100's memory, 80 GB", dx=8, dy=-6)
    c.curve(matrix, ORANGE, dashed=True)
    c.curve(flash, BLUE)
    c.label(*matrix[4], "P", "end", dx=-10, dy=-4)
    c.label(*flash[4], "q, k, v, o, lse", dx=0, dy=24)


@picture(268, "dq sums along a row of tiles, dk and dv down a column: two kernels")
def backward(p: Picture) -> None:
    panels = ((16, "dq: owns queries", "sums over keys →"), (232, "dk, dv: own keys", "sum over queries ↓"))
    for left, title, rule in panels:
        p.words(left, 26, title, "ink bold")
        p.words(left, 46, rule, "soft")
        for y, i in spaced(range(4), 58, 40):
            for x, j in spaced(range(i + 1), left, 46):
                summed = i == 2 if left < 100 else j == 1
                p.box(x, y, 42, 36, YELLOW if summed else GREY, "dS" if summed else "")
    p.box(162, 138, 42, 36, ORANGE, "dq 2")
    p.line(152, 156, 160, 156, arrow=True)
    p.box(278, 226, 62, 32, GREEN, "dk, dv 1")
    p.line(299, 216, 299, 224, arrow=True)
    p.words(16, 246, "One owner a sum: no atomics.", "soft")


@picture(312, "The roofline of an H100: what each algorithm may reach at its intensity")
def roofline(p: Picture) -> None:
    """Both algorithms on the roofline of an H100: forward at 8,192 tokens, dim 128, 16 heads."""
    shape = {"batch": 1, "heads": 16, "queries": 8192, "keys": 8192, "dim": 128}
    naive, flash = (accounting(**shape, algorithm=a, direction="forward") for a in ("naive", "flash"))
    once = flash.flops / (16 * 8192 * (4 * 128 * 2 + 4))  # if each tensor crosses once, and the cache serves the rest
    c = Chart(p, (16, 4096), (50, 1500))
    intensities, speeds = (16, 64, 256, 1024, 4096), (50, 100, 200, 500, 1000)
    c.axes("FLOPs per byte", "TFLOP/s at most, H100, bfloat16", intensities, speeds)

    def roof(intensity: float) -> float:
        return min(H100.peak_flops, intensity * H100.hbm_bytes_per_s) / 1e12

    balance = H100.peak_flops / H100.hbm_bytes_per_s
    c.curve([(x, roof(x)) for x in (16, balance, 4096)], GREY)
    c.label(balance, roof(balance), f"balance: {balance:.0f}", "middle", dy=-10)
    for x, colour, name, anchor, dx, dy in (
        (naive.intensity, ORANGE, f"plain: {naive.intensity:.0f}", "start", 12, 6),
        (flash.intensity, BLUE, f"flash, cache misses all: {flash.intensity:.0f}", "start", 12, 8),
        (once, GREEN, f"flash, cache serves: {once:,.0f}", "end", 4, 24),
    ):
        c.dot(x, roof(x), colour, name, anchor, dx, dy)


@picture(250, "Fused cross entropy: the logits of one chunk of rows exist at a time")
def chunks(p: Picture) -> None:
    """Fused cross-entropy computes the logits of one chunk of rows at a time."""
    rows, vocabulary, chunk = 8192, 50257, 128
    p.words(16, 26, f"logits: {rows:,} × {vocabulary:,}, {4 * rows * vocabulary / 1e9:.1f} GB in float32", "ink bold")
    for y, i in spaced(range(4), 42, 34):
        p.box(16, y, 54, 28, GREEN, f"x {i}")
        if i == 1:
            p.box(80, y, 220, 28, ORANGE, f"this chunk: {4 * chunk * vocabulary / 1e6:.0f} MB", hatched=True)
            p.line(304, y + 14, 326, y + 14, arrow=True)
            p.box(330, y, 94, 28, BLUE, "loss, dx")
        else:
            p.frame(80, y, 220, 28, "done, forgotten" if i == 0 else "not yet made")
    p.line(268, 106, 268, 190, arrow=True)
    p.box(80, 194, 220, 28, BLUE, "dweight: float32, added up")
    p.words(16, 242, "Kept for backward: dx and dweight.", "soft")


def steps(behind: bool, tiles: int = 3) -> tuple[Lane, Lane]:
    """Lanes of the matrix products and exponentials of one program's tiles; each takes one unit."""
    products, exponentials = Lane(), Lane()
    for i in range(tiles):
        products.add(exponentials.end, 1, f"S{i}")
        exponentials.add(products.end, 1, f"P̃{i}")
        if not behind:
            products.add(exponentials.end, 1, f"P̃{i} v")
        elif i:
            products.add(0, 1, f"P̃{i - 1} v")
    if behind:
        products.add(exponentials.end, 1, f"P̃{tiles - 1} v")
    return products, exponentials


@picture(206, "The product with v in its own step, and one step behind")
def behind(p: Picture) -> None:
    for top, name, late in ((30, "in its own step", False), (114, "one step behind", True)):
        p.lanes(top, name, 45, *steps(late), end="{:g} units")
    p.words(16, 194, "blue: products; orange: exponentials", "soft")


def staged(stages: int, tiles: int = 3) -> tuple[Lane, Lane]:
    """Lanes of copies (2 units) and steps (3 units). A copy starts with an earlier step's last product, or after it."""
    copies, arithmetic, last_products = Lane(), Lane(), list[float]()
    for i in range(tiles):
        before = i - max(stages - 1, 1)  # the step that starts this copy; the first copies start before the loop
        ready = last_products[before] + (stages == 1) if before >= 0 else 0.0
        start = arithmetic.add(copies.add(ready, 2, f"k{i}, v{i}") + 2, 2, f"S{i}, P̃{i}")
        last_products.append(arithmetic.add(start, 1, f"P̃{i}v"))
    return copies, arithmetic


@picture(290, "Three steps of the walk over keys with one, two and three stages")
def pipelined(p: Picture) -> None:
    for top, stages in spaced((1, 2, 3), 26, 84):
        copies, arithmetic = staged(stages)
        p.words(16, top, f"num_stages={stages}: {arithmetic.end:g} units", "ink bold")
        p.bars(top + 8, 27.2, copies, ORANGE)
        p.bars(top + 36, 27.2, arithmetic, BLUE)
    p.words(16, 278, "orange: copies; blue: arithmetic", "soft")


def mistaken(n: int = 36, tile: int = 16) -> list[tuple[str, str, Tensor]]:
    """Return (mistake, mask, largest relative error of each row of o)."""
    q, k, v = torch.randn(3, n, tile, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores, pos = q @ k.T / tile**0.5, torch.arange(n)
    causal = scores.masked_fill(pos > pos[:, None], -torch.inf)
    plain, right = scores.softmax(1) @ v, causal.softmax(1) @ v
    weights, absent = scores.exp(), -n % tile  # an absent key has score 0, so weight 1, and value 0
    tops = torch.stack([causal[:, : (j // tile + 1) * tile].amax(1) for j in pos.tolist()], 1)  # m after the key's tile
    unrepaired, late = (causal - tops).exp(), torch.where(pos // tile < pos[:, None] // tile, causal, -torch.inf)
    short = plain.masked_fill((pos >= n // tile * tile)[:, None], torch.nan)
    return [
        (name, rule, ((o - want).abs().amax(1) / want.abs().amax(1)))
        for name, rule, o, want in (
            ("absent keys", "no mask", weights @ v / (weights.sum(1, True) + absent), plain),
            ("absent keys", "causal", right, right),
            ("grid too small", "no mask", short, plain),
            ("α left out", "causal", unrepaired @ v / unrepaired.sum(1, True), right),
            ("i > j", "causal", causal.masked_fill(pos == pos[:, None], -torch.inf).softmax(1) @ v, right),
            ("no diagonal", "causal", late.softmax(1) @ v, right),
        )
    ]


@picture(354, "Which rows of the output five mistakes spoil")
def wrong_rows(p: Picture) -> None:
    """Errors of 36 rows in tiles of 16. An empty frame is NaN."""
    for i, (name, rule, errors) in enumerate(mistaken()):
        left, top = 44 + 136 * (i % 3), 52 + 160 * (i // 3)
        kinds = [None if e.isnan() else GREEN if e < 1e-9 else YELLOW if e < 0.1 else ORANGE for e in errors]
        p.words(left, top - 26, name, "ink bold")
        p.words(left, top - 9, f"{rule}: {sum(kind != GREEN for kind in kinds)} wrong", "soft small")
        for y, row in spaced((0, 16, 32), top, 48):
            p.line(left - 6, y, left, y)
            p.words(left - 9, y + 5, f"{row}" if i % 3 == 0 else "", "soft small", "end")
        y = float(top)
        for kind, run in groupby(kinds):
            height = 3 * len(list(run))
            p.box(left, y, 108, height - 0.5, kind, hatched=kind == ORANGE)
            y += height
    p.words(16, 342, "green: right; yellow: up to 10 % off; hatched: more", "soft")
