"""Pictures of the chapter on meshes. `lab.cluster.schedule` simulates the schedules; numbers are computed."""

import torch

from lab.cluster.schedule import Action, Simulation, check
from reference.mesh.mesh import Mesh
from reference.mesh.schedule_1f1b import schedule_1f1b
from reference.mesh.schedule_gpipe import schedule_gpipe
from reference.mesh.schedule_interleaved import schedule_interleaved

from .picture import BLUE, COLOURS, GREEN, GREY, ORANGE, WIDTH, YELLOW, Picture, picture, spaced

STAGES, MICRO_BATCHES = 4, 6  # of the worked example


@picture(424, "Eight ranks on two machines as data=2, pipe=2, expert=1, tensor=2")
def grid(p: Picture) -> None:
    """The ranks that each axis connects, for data=2, pipe=2, tensor=2."""
    for top, d in spaced(range(2), 36, 200):
        p.words(16, top - 10, f"machine {d}: data {d}", "ink bold")
        p.frame(16, top, 330, 140, kind="line")
        for rank in Mesh(data=2, pipe=2, tensor=2, rank=0).ranks("pipe", "tensor"):
            coordinate = Mesh(data=2, pipe=2, tensor=2, rank=rank).coordinate()
            x, y = 36 + 200 * coordinate["pipe"], top + 14 + 72 * coordinate["tensor"]
            p.box(x, y, 90, 40, COLOURS[coordinate["tensor"]], f"rank {rank + 4 * d}")
            if coordinate["tensor"] == 0:
                p.line(x + 45, y + 42, x + 45, y + 70)
                p.words(x + 52, y + 61, "tensor", "soft small")
            if coordinate["pipe"] == 0:
                p.line(x + 94, y + 20, x + 194, y + 20, arrow=True)
                p.words(x + 145, y + 14, "pipe", "soft small", "middle")
    p.line(390, 106, 390, 306, dashed=True)
    for y in (106, 306):
        p.line(348, y, 390, y, dashed=True)
    p.words(400, 211, "data", "soft small")
    p.words(16, 406, "blue: tensor 0; orange: tensor 1; stages from left to right", "soft")


@picture(208, "Eight ranks, once for each axis: ranks of a group have one colour and letter")
def groups(p: Picture) -> None:
    """The groups of each axis. Ranks of one group have the same colour."""
    mesh = Mesh(data=2, pipe=2, tensor=2, rank=0)
    for x, rank in spaced(range(mesh.world), 126, 40):
        p.words(x, 26, str(rank), "ink bold", "middle")
    p.words(16, 26, "rank", "soft")
    for y, axes in spaced((("tensor",), ("pipe",), ("data",), ("pipe", "tensor")), 38, 38):
        p.words(14, y + 18, "×".join(axes), "ink")
        for letter, colour, ranks in zip("abcd", COLOURS, mesh.partition(*axes), strict=False):
            for rank in ranks:
                p.box(109 + 40 * rank, y, 36, 28, colour, letter)
    p.words(16, 200, "along expert, of degree 1, each rank is alone", "soft small")


def matrix(
    p: Picture, x: float, y: float, name: str, down: range, across: range, r: int, hatched: bool = False
) -> None:
    """Draw a matrix of 4 × 4 cells, with the cells of one rank filled; grey if the rank has all cells."""
    cell, colour = 11, GREY if len(down) == len(across) == 4 and not hatched else COLOURS[r]
    p.words(x + 22, y - 5, name, "soft small", "middle")
    for i in range(4):
        for k in range(4):
            left, top = x + cell * k, y + cell * i
            if i in down and k in across:
                p.box(left, top, cell - 1, cell - 1, colour, hatched=hatched)
            else:
                p.frame(left, top, cell - 1, cell - 1, kind="faint")


@picture(358, "A 4 × 4 matrix on a mesh of data=2 × tensor=2: what each of the four ranks has, for six ways to cut it")
def placed(p: Picture) -> None:
    """The cells of each rank for six layouts of a 4 × 4 matrix A[i, j] on data=2 × tensor=2."""
    full, half = range(4), (range(2), range(2, 4))
    layouts = (
        ("A[i, j]", lambda d, t: (full, full, 0)), ("A[i/D, j]", lambda d, t: (half[d], full, d)),
        ("A[i, j/T]", lambda d, t: (full, half[t], t)), ("A[i/D, j/T]", lambda d, t: (half[d], half[t], 2 * d + t)),
        ("A[i/(D·T), j]", lambda d, t: (range(2 * d + t, 2 * d + t + 1), full, 2 * d + t)),
        ("A[i/D, j]{T}", lambda d, t: (half[d], full, 2 * d + t)),
    )  # fmt: skip
    for n, (name, cells) in enumerate(layouts):
        left, top = 22 + 142 * (n % 3), 22 + 164 * (n // 3)
        p.words(left + 52, top, name, "ink bold small", "middle")
        for d in range(2):
            for t in range(2):
                down, across, block = cells(d, t)
                matrix(p, left + 58 * t, top + 24 + 62 * d, f"{2 * d + t}", down, across, block, hatched=n == 5)
    p.words(16, 336, "number: rank; upper row: data 0; left column: tensor 0", "soft small")
    p.words(16, 352, "one colour: the same numbers; hatched: to be added", "soft small")


@picture(470, "A product of 4 × 4 matrices on two ranks in four cases: what each rank has, and what it computes")
def cases(p: Picture) -> None:
    """Y = A B on two ranks in four layouts, before any message: the cells of A and B that each rank has."""
    full, half = range(4), (range(2), range(2, 4))
    rows = (
        ("1: i is cut", lambda r: (half[r], full), lambda r: (full, full), "nothing to send"),
        ("2: j is cut in both", lambda r: (full, half[r]), lambda r: (half[r], full), "all-reduce Y"),
        ("3: j is cut in A", lambda r: (full, half[r]), lambda r: (full, full), "all-gather A, or cut B"),
        ("4: i and k, by one axis", lambda r: (half[r], full), lambda r: (full, half[r]), "all-gather A or B"),
    )

    for left, r in spaced(range(2), 16, 216):
        p.words(left, 22, f"rank {r}", "ink bold")
    for top, (name, part_a, part_b, send) in spaced(rows, 46, 104):
        p.words(16, top, name, "ink")
        p.words(424, top, send, "ink", "end")
        for left, r in spaced(range(2), 16, 216):
            (i, j), (inner, k) = part_a(r), part_b(r)
            y = top + 26
            matrix(p, left, y, "A", i, j, r)
            p.words(left + 54, y + 27, "·", "ink bold", "middle")
            matrix(p, left + 64, y, "B", inner, k, r)
            p.words(left + 118, y + 27, "=", "ink bold", "middle")
            computed = i if j == inner else range(0)  # a product needs equal columns of A and rows of B
            matrix(p, left + 128, y, "Y", computed, k, r, hatched=len(j) < 4)
    p.words(16, 448, "blue, orange: this rank's own part; grey: whole, on both ranks", "soft small")
    p.words(16, 464, "hatched: a summand; empty: not on this rank", "soft small")


@picture(330, "A product cut by columns, then one cut by rows: each rank has a summand")
def matrices(p: Picture) -> None:
    """x A with A split by columns, φ, then B split by rows: each rank has a summand."""
    x, a = torch.tensor([[1, 2]]), torch.tensor([[1, 0, 1, -1], [0, 1, -1, 1]])
    b = torch.tensor([[1, 2], [0, 1], [3, 0], [1, 1]])
    before = x @ a
    hidden = before.relu()
    for top, r in spaced(range(2), 40, 140):
        part = slice(2 * r, 2 * r + 2)
        p.words(16, top - 14, f"rank {r}", "ink bold")
        blocks = (
            ("x", x, GREY), ("A", a[:, part], COLOURS[r]), ("x A", before[:, part], COLOURS[r]),
            ("φ(x A)", hidden[:, part], COLOURS[r]), ("B", b[part], COLOURS[r]),
            ("summand", hidden[:, part] @ b[part], YELLOW),
        )  # fmt: skip
        for left, (name, block, colour) in spaced(blocks, 16, 70):
            p.words(left, top + 8, name, "soft small")
            for down, row in spaced(block.tolist(), top + 16, 32):
                for across, number in spaced(row, left, 28):
                    p.box(across, down, 26, 28, colour, str(number).replace("-", "−"))
    y = (hidden @ b)[0].tolist()
    p.words(16, 312, f"all-reduce of both summands: y = ({y[0]}, {y[1]})", "ink")


@picture(250, "f and g: where a tensor-parallel region begins and ends")
def conjugates(p: Picture) -> None:
    """f all-reduces in backward, g in forward."""
    for top, way, d, f, g in ((44, "forward", "", "copy", "all-reduce"), (148, "backward", "d", "all-reduce", "copy")):
        p.words(16, top - 12, way, "ink bold")
        for y, r in spaced(range(2), top, 40):
            p.box(16, y, 40, 32, GREY, f"{d}x")
            p.box(172, y, 96, 32, COLOURS[r], f"part {r}")
            p.box(384, y, 40, 32, GREY, f"{d}y")
            for span in ((58, 70), (158, 170), (270, 282), (370, 382)):
                start, end = span if way == "forward" else reversed(span)
                p.line(start, y + 16, end, y + 16, arrow=True)
        for left, op, name in ((72, f, "f"), (284, g, "g")):
            p.box(left, top, 84, 72, ORANGE if op == "all-reduce" else GREY, op)
            p.words(left + 42, top + 18, name, "in bold", "middle")
    p.words(16, 240, "grey: the same on all ranks", "soft")


@picture(268, "Attention with 8 query heads and 2 key heads on two ranks")
def heads(p: Picture) -> None:
    """8 query heads and 2 key heads on two ranks, and the rows of o that belong to them."""
    queries, ranks = 8, 2
    names = (("q: columns", 44), ("k, v: columns", 84), ("o: rows", 124))
    p.words(16, 30, "rank", "soft")
    for left, rank in spaced(range(ranks), 124, 156):
        p.words(left + 74, 30, str(rank), "ink bold", "middle")
        for x, i in spaced(range(queries // ranks), left, 37):
            for _, y in (names[0], names[2]):
                p.box(x, y, 35, 28, COLOURS[rank], str(rank * queries // ranks + i))
        p.box(left, names[1][1], 146, 28, COLOURS[rank], f"key head {rank}")
        p.box(left, 176, 146, 28, YELLOW, f"summand {rank}")
        p.line(left + 73, 154, left + 73, 174, arrow=True)
        p.line(left + 73, 206, 276 - 4 * (1 - 2 * rank) * 2, 222, arrow=True)
    for name, y in names:
        p.words(16, y + 19, name, "ink")
    p.box(203, 224, 146, 28, GREY, "all-reduce: y")
    p.words(16, 195, "width of y", "ink")
    p.words(16, 262, "numbers: query heads", "soft small")


@picture(304, "The mlp with sequence parallelism on two ranks, and its collectives both ways")
def sequence(p: Picture) -> None:
    """The mlp with sequence parallelism on two ranks: shapes in forward, and collectives in both directions."""
    columns = ((16, 34, "n/T × w"), (138, 34, "n × w"), (196, 56, "n × h/T"), (276, 34, "n × w"), (398, 34, "n/T × w"))
    names, height = ("norm", "X", "φ(X A)", "summand", "next"), 40
    for (x, width, shape), name in zip(columns, names, strict=True):
        inner = min(max(x + width / 2, 38), WIDTH - 38)
        p.words(inner, 24, name, "ink", "middle")
        p.words(inner, 42, shape, "soft small", "middle")
    for top, r in spaced(range(2), 76, 112):
        p.words(16, top - 8, f"rank {r}", "ink small")
        for column, (x, width, _) in enumerate(columns):
            if column in (0, 4):
                p.box(x, top + height * r, width, height, COLOURS[r])
                p.frame(x, top + height * (1 - r), width, height)
            elif column == 2:
                p.box(x, top, width, 2 * height, COLOURS[2 + r])
            else:
                for part in range(2):
                    p.box(x, top + height * part, width, height - 1, COLOURS[part], hatched=column == 3)
        for left, text in ((173, "A"), (255, "B")):
            p.line(left + 1, top + 54, left + 18, top + 54, arrow=True)
            p.words(left + 9, top + 46, text, "soft small", "middle")
    for x, forward, backward in ((56, "all-gather", "reduce-scatter"), (316, "reduce-scatter", "all-gather")):
        p.box(x, 76, 76, 192, GREY)
        for y, text, sign in ((112, forward, 1), (204, backward, -1)):
            first, dash, second = text.partition("-")
            p.words(x + 38, y, first + dash, "in", "middle")
            p.words(x + 38, y + 17, second, "in", "middle")
            span = (x + 16, x + 60)[::sign]
            p.parts.append(f'<path d="M{span[0]} {y + 32} H{span[1]}" stroke="#101418" stroke-width="1.5"/>')
            tip = 7 * sign
            p.parts.append(f'<path d="M{span[1] + tip} {y + 32} l{-tip} -4 v8 Z" fill="#101418"/>')
    p.words(16, 294, "grey: forward above, backward below; hatched: not summed yet", "soft small")


def simulate(kind: str, micro_batches: int = MICRO_BATCHES, chunks: int = 1, stages: int = STAGES) -> Simulation:
    """Simulate a schedule on logical clocks. A micro-batch takes 1 forward and 2 backward per rank, over all chunks."""
    if kind == "interleaved":
        ranks = [schedule_interleaved(r, stages, micro_batches, chunks) for r in range(stages)]
    else:
        schedule = {"gpipe": schedule_gpipe, "1f1b": schedule_1f1b}[kind]
        ranks = [schedule(r, stages, micro_batches) for r in range(stages)]
    return check(ranks, micro_batches, chunks, 1 / chunks, 2 / chunks)


def lanes(p: Picture, top: float, name: str, run: Simulation, unit: float) -> None:
    """Draw a lane per rank: forward blue (second chunk green), backward orange (second chunk yellow)."""
    p.words(16, top, f"{name}: {run.length:g}", "ink bold")
    for rank, (y, actions) in enumerate(spaced(run.ranks, top + 8, 26)):
        p.words(16, y + 17, str(rank), "soft small")
        p.frame(30, y, unit * run.length, 23, kind="faint")
        for action, start, end in zip(actions, run.starts[rank], run.ends[rank], strict=True):
            colours = (BLUE, GREEN) if action.kind == "forward" else (ORANGE, YELLOW)
            x, w = 30 + unit * start, unit * (end - start) - 1
            p.box(x, y, w, 23, colours[action.chunk])
            p.words(x + w / 2, y + 16, str(action.micro_batch), "in small", "middle")


@picture(440, "Four stages: one batch whole, then six micro-batches by GPipe and by 1F1B")
def schedules(p: Picture) -> None:
    unit, one_batch = 14.6, [[Action("forward", 0), Action("backward", 0)]] * STAGES
    lanes(p, 24, "one batch, smaller scale", check(one_batch, 1, 1, MICRO_BATCHES, 2 * MICRO_BATCHES), unit * 27 / 72)
    for top, name, kind in ((160, "GPipe", "gpipe"), (296, "1F1B", "1f1b")):
        lanes(p, top, name, simulate(kind), unit)
    p.words(16, 430, "rows: ranks; blue: forward, orange: backward of a micro-batch", "soft small")


@picture(304, "Four stages and four micro-batches by 1F1B and interleaved in two chunks")
def interleaved(p: Picture) -> None:
    lanes(p, 24, "1F1B", simulate("1f1b", 4), 18.6)
    lanes(p, 160, "interleaved, 2 chunks", simulate("interleaved", 4, 2), 18.6)
    p.words(16, 294, "blue, orange: chunk 0; green, yellow: chunk 1", "soft small")


def alive(run: Simulation, rank: int) -> list[int]:
    """Activations that a rank keeps in each unit of time: forwards that began minus backwards that ended."""
    rows = list(zip(run.ranks[rank], run.starts[rank], run.ends[rank], strict=True))
    starts = [start for action, start, _ in rows if action.kind == "forward"]
    ends = [end for action, _, end in rows if action.kind == "backward"]
    return [sum(s <= t for s in starts) - sum(e <= t for e in ends) for t in range(round(run.length))]


@picture(262, "Activations alive on rank 0: six by GPipe, at most four by 1F1B")
def live(p: Picture) -> None:
    """Rank 0's activations over a step of the worked example."""
    left, bottom, width, unit = 36.0, 206.0, 14.6, 26.0
    p.words(16, 22, "alive on rank 0: grey GPipe, blue 1F1B", "soft")
    many, few = (alive(simulate(kind), 0) for kind in ("gpipe", "1f1b"))
    for x, (grey, blue) in spaced(zip(many, few, strict=True), left, width):
        p.box(x, bottom - unit * grey, width - 1, unit * grey, GREY)
        p.box(x + 4, bottom - unit * blue, width - 7, unit * blue, BLUE)
    for value in (0, 2, 4, 6):
        p.words(left - 8, bottom - unit * value + 5, str(value), "soft small", "end")
    p.line(left, bottom, left + width * len(many), bottom)
    p.words(left + width * len(many) / 2, bottom + 22, "time, in forwards", "soft", "middle")
    p.words(16, 252, f"at most {max(many)} and {max(few)} micro-batches", "ink")
