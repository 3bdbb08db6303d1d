"""The pictures of the chapter on FlashAttention-2. What is a number in them is computed."""

from lab.cluster.hardware import cluster
from reference.flash_attention.accounting import accounting

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Chart, Picture, picture

H100 = cluster("dgx-h100", 8).device
SCORES = (1, 4, 2, 8)  # of the worked example: exp of each


@picture(392, "Plain attention writes and reads the score matrix; flash attention does not")
def traffic(p: Picture) -> None:
    n, dim = 8192, 128
    small, large = f"{2 * n * dim / 1e6:.0f} MB", f"{2 * n * n / 1e6:.0f} MB"
    p.words(16, 26, "Plain attention: three kernels", "ink bold")
    for y, there in ((80, "memory"), (154, "chip"), (276, "memory"), (340, "chip")):
        p.words(16, y, there, "soft")
    for i, (name, colour) in enumerate((("q, k", GREEN), ("S", ORANGE), ("P", ORANGE), ("v, o", GREEN))):
        p.box(86 + 88 * i, 60, 62, 32, colour, name, hatched=colour == ORANGE)
        p.words(117 + 88 * i, 52, large if colour == ORANGE else f"2 × {small}", "soft small", "middle")
    for i, name in enumerate(("q kᵀ", "softmax", "P v")):
        x = 130 + 88 * i
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
    p.words(100, 343, "a tile of S → P → · v", "in")
    p.words(400, 343, "m, l, acc stay here", "in small", "end")
    p.line(141, 290, 141, 312, arrow=True)
    p.line(357, 312, 357, 290, arrow=True)
    p.words(16, 382, f"q, k, v and o cross: {4 * 2 * n * dim / 1e6:.0f} MB; k, v again from the cache.", "soft")


@picture(470, "Tiles of the causal score matrix, and what one tile of queries keeps")
def tiles(p: Picture) -> None:
    p.words(230, 24, "keys and values, a tile at a time →", "soft", "middle")
    side = 62
    for j in range(4):
        p.box(120 + side * j, 36, side - 4, 24, GREEN, f"k, v {j}")
    for i in range(4):
        p.box(56, 66 + side * i, side - 4, side - 4, ORANGE, f"q {i}")
        for j in range(4):
            x, y = 120 + side * j, 66 + side * i
            if j > i:
                p.frame(x, y, side - 4, side - 4)
            else:
                p.box(x, y, side - 4, side - 4, YELLOW if i == j else BLUE, "i ≥ j" if i == j else "all")
    p.words(16, 340, "A tile of queries walks along its row and keeps", "ink bold")
    kept = (("m", 30, "the largest score so far"), ("l", 30, "the sum of exponentials"), ("acc", 110, "Σ P v so far"))
    for i, (name, w, said) in enumerate(kept):
        p.box(16, 352 + 36 * i, w, 28, BLUE, name)
        p.words(140, 371 + 36 * i, said, "soft")


@picture(236, "Which warp has which scores, in version 1 and in version 2")
def warps(p: Picture) -> None:
    colours, side = (BLUE, GREEN, YELLOW, ORANGE), 144
    for x, name, whose in ((28, "version 1", "keys"), (252, "version 2", "queries")):
        p.words(x, 26, f"{name}: by {whose}", "ink bold")
        for i, colour in enumerate(colours):
            along, across = side / 4 * i, side / 4 - 3
            place = (x + along, 44, across, side) if whose == "keys" else (x, 44 + along, side, across)
            p.box(*place, colour, f"{i}")
        p.line(x - 8, 98, x + side + 8, 98, dashed=True)
        told = "each row in 4 parts" if whose == "keys" else "each row whole"
        p.words(x, 212, told, "soft")


@picture(306, "Online softmax of four scores in two tiles: older weights shrink when m rises")
def online(p: Picture) -> None:
    """Bars are exp(score − m): what each key weighs under the maximum that is known."""
    first, largest = max(SCORES[:2]), max(SCORES)
    panels = (
        ("after tile 1", f"m = ln {first}", [e / first for e in SCORES[:2]]),
        ("m rises: × α", f"α = {first}/{largest}", [e / largest for e in SCORES[:2]]),
        ("after tile 2", f"m = ln {largest}", [e / largest for e in SCORES]),
    )
    for i, (title, rule, weights) in enumerate(panels):
        left = 16 + 140 * i
        p.words(left, 26, title, "ink bold")
        p.words(left, 46, rule, "soft")
        for j, weight in enumerate(weights):
            x, h = left + 31 * j, 150 * weight
            p.box(x, 226 - h, 27, h, BLUE if j < 2 else ORANGE)
            p.words(x + 13, 220 - h, _fraction(weight), "ink small", "middle")
            p.words(x + 13, 243, f"ln {SCORES[j]}", "soft small", "middle")
        p.line(left, 226, left + 124, 226)
        p.words(left, 268, f"l = {_fraction(sum(weights))}", "ink bold")
    p.words(16, 294, "blue: scores of tile 1; orange: of tile 2", "soft")


def _fraction(x: float) -> str:
    over = next(d for d in (1, 2, 4, 8) if (x * d).is_integer())
    return f"{x * over:.0f}/{over}" if over > 1 else f"{x:.0f}"


@picture(190, "Ten numbers in blocks of four: three programs, and a mask for the last")
def programs(p: Picture) -> None:
    """Vector addition: a program a block, and a mask for the last."""
    n, block = 10, 4
    for i in range(3):
        x = 16 + 140 * i
        p.words(x, 26, f"program {i}", "ink bold")
        p.words(x, 46, f"offs = {block * i} … {block * i + 3}", "soft")
        for j in range(block):
            at = i * block + j
            if at < n:
                p.box(x + 32 * j, 62, 28, 34, (BLUE, ORANGE, GREEN)[i], str(at))
            else:
                p.frame(x + 32 * j, 62, 28, 34, str(at))
    p.line(16, 116, 16 + 140 * 2 + 60, 116)
    p.words(16, 138, "the tensor in memory ends here: n = 10", "soft")
    p.line(356, 116, 356, 100, arrow=True)
    p.words(16, 172, "dashed: offs < n is false, so nothing is read or written", "soft")


@picture(268, "Addresses of a tile of 2 × 4 in a matrix of 4 × 6 with stride_row 6")
def addresses(p: Picture) -> None:
    """A tile of addresses from two ranges of offsets: rows down, columns across."""
    rows, columns, block = 4, 6, (2, 4)
    p.words(16, 26, "x: 4 rows, 6 columns, stride_row = 6, stride_column = 1", "soft")
    for i in range(rows):
        p.words(16, 62 + 36 * i, f"row {i}", "soft")
        for j in range(columns + 2):
            x, y = 70 + 44 * j, 40 + 36 * i
            inside = i >= rows - block[0] and j >= 4
            if j >= columns and inside:
                p.frame(x, y, 40, 32, str(i * columns + j))
            elif j < columns:
                p.box(x, y, 40, 32, ORANGE if inside else GREY, str(i * columns + j))
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
    c.say(lengths[0], memory, "an H100's memory, 80 GB", dx=8, dy=-6)
    c.curve(matrix, ORANGE, dashed=True)
    c.curve(flash, BLUE)
    c.say(*matrix[4], "P", "end", dx=-10, dy=-4)
    c.say(*flash[4], "q, k, v, o, lse", dx=0, dy=24)


@picture(268, "dq sums along a row of tiles, dk and dv down a column: two kernels")
def backward(p: Picture) -> None:
    for left, title, rule in (
        (16, "dq: owns queries", "sums over keys →"),
        (232, "dk, dv: own keys", "sum over queries ↓"),
    ):
        p.words(left, 26, title, "ink bold")
        p.words(left, 46, rule, "soft")
        for i in range(4):
            for j in range(i + 1):
                mine = i == 2 if left < 100 else j == 1
                p.box(left + 46 * j, 58 + 40 * i, 42, 36, YELLOW if mine else GREY, "dS" if mine else "")
    p.box(16 + 46 * 3 + 8, 138, 42, 36, ORANGE, "dq 2")
    p.line(16 + 46 * 3 - 2, 156, 16 + 46 * 3 + 6, 156, arrow=True)
    p.box(232 + 46, 226, 62, 32, GREEN, "dk, dv 1")
    p.line(232 + 46 + 21, 216, 232 + 46 + 21, 224, arrow=True)
    p.words(16, 246, "One owner a sum: no atomics.", "soft")


@picture(312, "The roofline of an H100: what each algorithm may reach at its intensity")
def roofline(p: Picture) -> None:
    """Both algorithms under the roof of an H100, forward at 8,192 tokens, dim 128, 16 heads."""
    shape = {"batch": 1, "heads": 16, "queries": 8192, "keys": 8192, "dim": 128}
    naive, flash = (accounting(**shape, algorithm=a, direction="forward") for a in ("naive", "flash"))
    once = flash.flops / (16 * 8192 * (4 * 128 * 2 + 4))  # each tensor crosses once; the cache serves the rest
    c = Chart(p, (16, 4096), (50, 1500))
    c.axes(
        "FLOPs per byte", "TFLOP/s at most, H100, bfloat16",
        {x: f"{x:,}" for x in (16, 64, 256, 1024, 4096)}, {y: f"{y:,}" for y in (50, 100, 200, 500, 1000)},
    )  # fmt: skip

    def roof(intensity: float) -> float:
        return min(H100.peak_flops, intensity * H100.hbm_bytes_per_s) / 1e12

    balance = H100.peak_flops / H100.hbm_bytes_per_s
    c.curve([(x, roof(x)) for x in (16, balance, 4096)], GREY)
    c.say(balance, roof(balance), f"balance: {balance:.0f}", "middle", dy=-10)
    for x, colour, name, anchor, dx, dy in (
        (naive.intensity, ORANGE, f"plain: {naive.intensity:.0f}", "start", 12, 6),
        (flash.intensity, BLUE, f"flash, cache misses all: {flash.intensity:.0f}", "start", 12, 8),
        (once, GREEN, f"flash, cache serves: {once:,.0f}", "end", 4, 24),
    ):
        c.dot(x, roof(x), colour)
        c.say(x, roof(x), name, anchor, dx, dy)


@picture(250, "Fused cross entropy: the logits of one chunk of rows exist at a time")
def chunks(p: Picture) -> None:
    """Fused cross entropy: logits of a chunk of rows at a time."""
    rows, vocabulary, chunk = 8192, 50257, 128
    p.words(16, 26, f"logits: {rows:,} × {vocabulary:,}, {4 * rows * vocabulary / 1e9:.1f} GB in float32", "ink bold")
    for i in range(4):
        y = 42 + 34 * i
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


def steps(behind: bool, tiles: int = 3) -> tuple[list, list]:
    """Bars (start, length, words) of products and of exponentials, each a unit long, for the tiles of one program."""
    products, exponentials, now = [], [], 0
    for i in range(tiles):
        products.append((now, 1, f"S{i}"))
        exponentials.append((now + 1, 1, f"P{i}"))
        if behind and i:
            products.append((now + 1, 1, f"P{i - 1} v"))
        now += 2
        if not behind:
            products.append((now, 1, f"P{i} v"))
            now += 1
    if behind:
        products.append((now, 1, f"P{tiles - 1} v"))
    return products, exponentials


@picture(206, "The product with v in its own step, and one step behind")
def behind(p: Picture) -> None:
    for top, name, late in ((30, "in its own step", False), (114, "one step behind", True)):
        products, exponentials = steps(late)
        end = max(start + long for start, long, _ in products)
        p.words(16, top, f"{name}: {end} units", "ink bold")
        p.bars(top + 8, 45, products, BLUE)
        p.bars(top + 36, 45, exponentials, ORANGE)
    p.words(16, 194, "blue: products; orange: exponentials", "soft")
