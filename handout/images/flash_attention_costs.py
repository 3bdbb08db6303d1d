"""Pictures of the chapter on FlashAttention-2: orders of programs, occupancy of a multiprocessor, measured speeds."""

import math

from reference.flash_attention.occupancy import Multiprocessor, occupancy

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Picture, load, picture, spaced


@picture(356, "Outer loop over keys or over queries: order of tiles, and multiprocessors that are busy")
def outer(p: Picture) -> None:
    """One program per head, which visits column after column; and one per row of tiles. 16 heads of 16,384 tokens."""
    heads, n, sms, side = 16, 16384, 108, 4
    for left, order, programs in ((16, "keys", heads), (232, "queries", heads * n // 128)):
        p.words(left, 24, f"outer loop: {order}", "ink bold")
        for cell in range(side**2):
            i, j = divmod(cell, side)
            visit, colour = (j * side + i, BLUE) if order == "keys" else (j, (BLUE, GREEN, YELLOW, ORANGE)[i])
            p.box(left + 48 * j, 36 + 30 * i, 45, 27, colour, f"{visit + 1}")
        p.words(left, 176, "1 program, 16 steps" if order == "keys" else "4 programs, 4 steps each", "soft")
        for k in range(sms):
            box = (left + 16 * (k % 12), 192 + 14 * (k // 12), 13, 11)
            p.box(*box, BLUE) if k < programs else p.frame(*box, kind="line")
        p.words(left, 338, f"{programs:,} programs: {min(programs, sms)} busy", "ink")


@picture(396, "One program's walk along k: what lies in shared memory, and which warp sums which rows")
def walk(p: Picture) -> None:
    """The third step of a matrix product of size 512, with tiles of 128 × 128, 64 along k, 3 stages and 8 warps."""
    n, block, inner, stages, warps, now = 512, 128, 64, 3, 8, 2
    p.words(16, 48, f"step {now} (of 0 to {n // inner - 1})", "ink bold")
    legend = ("grey: used", "blue: multiplied now", "hatched: copied ahead", "dashed: still in HBM")
    for y, words in spaced(legend, 72, 24):
        p.words(16, y, words, "soft")
    p.words(16, 180, f"x: {block} rows, {inner} a step", "ink")
    p.words(424, 24, f"y: {block} columns, {inner} a step", "ink", "end")
    for k in range(n // inner):
        colour = GREY if k < now else BLUE if k == now else ORANGE if k < now + stages else None
        p.box(16 + 26 * k, 190, 24, 142, colour, f"{k}", hatched=colour == ORANGE)
        p.box(232, 32 + 19 * k, 192, 17, colour, f"{k}", hatched=colour == ORANGE)
    for y, warp in spaced(range(warps), 190, 18):
        p.box(232, y, 192, 16, GREEN, f"warp {warp}: rows {16 * warp} to {16 * warp + 15}")
    shared, acc = stages * 2 * block * inner * 2, block**2
    p.words(16, 360, f"shared memory: {stages} tiles of x, {stages} of y, {shared:,} bytes", "soft")
    p.words(16, 382, f"registers: acc, {acc:,} numbers, {acc // (32 * warps)} in each thread", "soft")


@picture(290, "Which tiles of x and y the programs read that run at once: column order, and patches")
def patches(p: Picture) -> None:
    """16 programs of 16 × 16 in two orders, and the cost of a product of 16,384 in each, from counters.json."""
    rows = load("results/counters.json")["rows"]
    for left, name, height, order in ((16, "columns", 16, "columns"), (232, "patches of 4 rows", 4, "patches of 16")):
        record = next(row for row in rows if row["kernel"] == f"product of 16,384, {order}")
        tiles = [(n % height, n // height) for n in range(16)]  # all in the first patch
        down, across = {i for i, _ in tiles}, {j for _, j in tiles}
        p.words(left, 24, f"{name}: {len(down)} + {len(across)}", "ink bold")
        p.words(left, 68, "x", "soft")
        p.words(left + 198, 50, "y", "soft", "end")
        p.frame(left + 29, 59, 169, 169, kind="line")
        operands = [*((i, -1.4, BLUE) for i in down), *((-1.4, j, ORANGE) for j in across)]
        for i, j, colour in (*((i, j, GREY) for i, j in tiles), *operands):
            p.box(left + 30 + 10.5 * j, 60 + 10.5 * i, 9.5, 9.5, colour)
        p.words(left, 256, f"16,384, {order}:", "soft")
        mb, us = (float(record[what].replace(",", "")) for what in ("DRAM, MB", "µs"))
        p.words(left, 276, f"{mb / 1e3:.0f} GB, {us / 1e3:.1f} ms", "ink")


@picture(246, "One multiprocessor: two programs of the forward kernel fit, a third does not")
def room(p: Picture) -> None:
    """Programs of our forward kernel that fit on one multiprocessor of an H100."""
    m, registers, shared, warps = Multiprocessor(), 138, 115_712, 4
    fits = occupancy(registers, shared, warps)
    used_registers = warps * math.ceil(32 * registers / m.register_unit) * m.register_unit
    used_bytes = math.ceil((shared + m.shared_reserved) / m.shared_unit) * m.shared_unit
    rows = (
        ("registers", used_registers, m.registers),
        ("shared memory, bytes", used_bytes, m.shared_bytes),
        ("warps", warps, m.warps),
    )
    for y, (name, used, limit) in spaced(rows, 44, 64):
        step = 240.0 * used / limit
        p.words(16, y - 8, f"{name}: {fits.programs} × {used:,} of {limit:,}", "ink")
        for k in range(fits.programs):
            p.box(16 + k * step, y, step - 2, 26, BLUE, ("first", "second")[k] if step > 50 else f"{k + 1}")
        p.frame(16 + fits.programs * step, y, step - 4, 26, "a third?" if step > 50 else "3")
        p.line(256, y - 2, 256, y + 32)
    p.words(16, 232, "Line: what there is. Two programs fill shared memory.", "soft")


@picture(330, "Attention on an H200: ours, FlashAttention-2 and cuDNN, forward and backward")
def fastest(p: Picture) -> None:
    """TFLOP/s at 8,192 tokens on an H200, of ours and two peers, from benchmarks/results/attention.json."""
    rows = load("results/attention.json")["rows"]
    selected = [r for r in rows if r["N"] == 8192 and r["what"] != "both"]
    in_order = sorted(selected, key=lambda r: (r["what"] == "backward", r["dim"], r["causal"]))
    for top, row in spaced(in_order, 18, 35):
        p.words(16, top + 12, f"{row['what']}, {row['dim']}", "ink")
        p.words(16, top + 26, "causal" if row["causal"] else "no mask", "soft small")
        for y, (peer, colour) in spaced((("ours", BLUE), ("flash2", ORANGE), ("cudnn", GREY)), top, 10):
            speed = int(row[peer].split()[0])
            p.box(134, y, 0.36 * speed, 9, colour, hatched=peer == "flash2")
            p.words(140 + 0.36 * speed, y + 9, f"{speed}", "soft small")
    p.words(16, 320, "TFLOP/s. Blue: ours; hatched: FA-2; grey: cuDNN.", "soft")


CYCLES = {"S": 2 * 64 * 128 * 128 / 4096, "P": 64 * 128 / 16, "v": 2 * 64 * 128 * 128 / 4096}  # for a group's 64 rows
PING_PONG = [
    (kind, group, tile)
    for tile in range(3)
    for group in range(2)
    for kind, tile in (("v", tile - 1), ("S", tile), ("P", tile))
    if 0 <= tile < 2
]  # a group's product with v and next scores, then its exponentials, while the other group computes products


Operations = list[tuple[float, float, str, int, int]]  # start, cycles, what, group, tile


def in_step() -> Operations:
    """Both groups share a unit and end together, so each operation takes twice its cycles (equal for all kinds)."""
    order = [(kind, tile) for tile in range(2) for kind in "SPv"]
    return [(2 * CYCLES[k] * i, 2 * CYCLES[k], k, group, tile) for i, (k, tile) in enumerate(order) for group in (0, 1)]


def in_turns() -> Operations:
    """Operations start in order. Each has its unit alone, and starts after its group's previous operation."""
    unit, ready, operations = {"P": 0.0, "products": 0.0}, [0.0, 0.0], []
    for kind, group, tile in PING_PONG:
        lane = "P" if kind == "P" else "products"
        start = max(unit[lane], ready[group])
        unit[lane] = ready[group] = start + CYCLES[kind]
        operations.append((start, CYCLES[kind], kind, group, tile))
    return operations


@picture(302, "Two groups of warps: in step, and in turns, so that exponentials are hidden")
def ping_pong(p: Picture) -> None:
    """Two groups of warps on one multiprocessor of an H100: a lane of tensor cores, and a lane of exponential units."""
    scale = 408 / 6144
    for top, name, operations, h in ((26, "in step", in_step(), 42), (164, "ping-pong", in_turns(), 28)):
        end = max(start + length for start, length, *_ in operations)
        busy = sum(CYCLES[kind] for *_, kind, _, _ in operations if kind != "P") / end
        p.words(16, top, f"{name}: {end:,.0f} cycles, tensor cores busy {100 * busy:.0f} %", "ink bold")
        for k in range(2):
            p.frame(16, top + 10 + (h + 6) * k, scale * end - 2, h)
        for start, length, kind, group, tile in operations:
            half = h > 28  # the groups share the lane
            y = top + 10 + (h + 6) * (kind == "P") + group * half * h / 2
            words = f"P̃{tile}·v" if kind == "v" else f"{kind}{tile}".replace("P", "P̃")
            p.box(16 + scale * start, y, scale * length - 2, h / 2 - 1 if half else h, (BLUE, YELLOW)[group], words)
    p.words(16, 274, "upper lane: tensor cores; lower: exponentials", "soft")
    p.words(16, 292, "blue: group 1; yellow: group 2", "soft")
