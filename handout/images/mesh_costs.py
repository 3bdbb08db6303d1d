"""Pictures of the chapter on meshes: costs of a step, most by the exercise accounting; zero-bubble schedules."""

from lab.cluster import jobs, steps
from lab.cluster.hardware import cluster
from lab.model.transformer import MODELS
from reference.mesh.accounting import Cost, Degrees, Workload, accounting
from reference.mesh.schedule_1f1b import schedule_1f1b

from .mesh import STAGES, simulate
from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Bar, Chart, Picture, picture, spaced


def costs(fsdp: bool = False) -> Cost:
    """The cost of a 70-billion model on 1,024 ranks, for stage 3 of 8."""
    work = Workload(MODELS["70b"], sequences=1024, context=4096, micro_batches=32)
    return accounting(work, Degrees(data=16, pipe=8, tensor=8), stage=3, fsdp=fsdp)


@picture(254, "Gigabytes that a rank sends along each axis in a step of the 70-billion model")
def axes_bytes(p: Picture) -> None:
    """Bytes that a rank sends along each axis in a step."""
    plain, sharded = costs().bytes, costs(fsdp=True).bytes
    rows = (
        ("tensor", plain["tensor"], BLUE), ("pipe", plain["pipe"], GREEN), ("data", plain["data×expert"], ORANGE),
        ("data, with FSDP", sharded["data"], ORANGE),
    )  # fmt: skip
    p.words(16, 24, "GB per rank and step, data=16, pipe=8, tensor=8", "soft")
    for y, (axis, sent, colour) in spaced(rows, 40, 48):
        w = 210 * sent / plain["tensor"]
        p.words(16, y + 22, axis, "ink")
        p.box(136, y, max(w, 3), 34, colour, hatched="FSDP" in axis)
        p.words(144 + w, y + 22, f"{sent / 1e9:,.1f} GB", "ink small")
    p.words(16, 244, "tensor: 4 all-reduces a block; pipe: 2 messages; data: once", "soft small")


@picture(330, "A layer's forward with tensor=8 and FSDP, and what crossing machines costs in measurements of others")
def exposed(p: Picture) -> None:
    """Forward of a layer of Llama 3 70B on H100s at tensor=8, data=16 with FSDP, 32,768 tokens per data rank, 16 bits.
    Products run at the peak, messages at full bandwidth. Below: speed left at 16 ranks, by Tazi et al. 2025."""
    tokens, width, keys, hidden, tensor, data = 32_768, 8192, 1024, 28_672, 8, 16
    h100 = cluster("dgx-h100", tensor * data)
    weights = {"qkvo": 2 * width * (width + keys), "mlp": 3 * width * hidden}
    products = {name: 1e3 * 2 * tokens * n / tensor / h100.device.peak_flops for name, n in weights.items()}
    reduce = 1e3 * 2 * (tensor - 1) / tensor * 2 * tokens * width / h100.inside.bytes_per_s
    gather = 1e3 * 2 * sum(weights.values()) / tensor * (data - 1) / data / h100.between.bytes_per_s
    compute, nvlink = list[Bar](), list[Bar]()
    now = 0.0
    for name, ms in products.items():
        compute.append((now, ms, name if ms < 2 else f"{name}: {ms:.1f}"))
        nvlink.append((now + ms, reduce, "all-reduce"))
        now += ms + reduce
    unit = 400 / now
    p.words(16, 22, f"one layer, forward: {now:.1f} ms", "ink bold")
    for top, name, bars, colour in (
        (34, "products", compute, BLUE), (86, f"tensor, on NVLink: {reduce:.1f} ms each", nvlink, ORANGE),
        (138, "data, on a network card: the next layer", [(0.0, gather, f"all-gather: {gather:.1f}")], GREEN),
    ):  # fmt: skip
        p.words(16, top + 13, name, "soft small")
        p.bars(top + 18, unit, bars, colour)
    for start, length, _ in nvlink:
        p.frame(16 + unit * start, 52, unit * length - 3, 24, "waits")
    p.line(16, 188, 424, 188, arrow=True)
    p.times(206, unit, range(0, 13, 4), "ms")
    p.words(16, 238, "speed left from 8 to 16 ranks, on two machines", "ink bold")
    for y, (name, left, colour) in spaced((("tensor", 0.57, ORANGE), ("pipe", 0.86, GREEN)), 250, 38):
        p.words(16, y + 19, name, "ink")
        p.box(76, y, 300 * left, 28, colour, f"{left:.0%}".replace("%", " %"))
        p.frame(76 + 300 * left + 2, y, 300 * (1 - left) - 2, 28)
        p.words(384, y + 19, f"−{1 - left:.0%}".replace("%", " %"), "ink small")


@picture(330, "Messages of a layer by tokens of a device, with 1, 2, 4 and 8 tensor ranks, and its products")
def split_messages(p: Picture) -> None:
    """Equations (10) + (11) for large D, and (9), in ms over tokens per device: 70B on H100s, all on one NVLink."""
    width, hidden, h100 = 8192, 28_672, cluster("dgx-h100", 8)
    chart = Chart(p, (256, 32_768), (0.2, 40))
    chart.right -= 36
    chart.axes("tokens of a device, t", "ms in forward of one mlp", (256, 1024, 4096, 16_384), (0.5, 1, 2, 5, 10, 20))
    tokens = [2 ** (8 + i / 8) for i in range(57)]
    chart.curve([(t, 4e3 * t * width * hidden / h100.device.peak_flops) for t in tokens], GREY, dashed=True)
    chart.label(12_000, 14, "products", "end")

    def sent(t: float, T: int) -> float:
        return 1e3 * 4 * width * (hidden / T + t * (T - 1)) / h100.inside.bytes_per_s

    for T, colour in ((1, BLUE), (2, GREEN), (4, ORANGE), (8, YELLOW)):
        chart.curve([(t, sent(t, T)) for t in tokens], colour)
        best = hidden / T**2
        chart.dot(best, sent(best, T), colour)
        chart.label(tokens[-1], sent(tokens[-1], T), f"T = {T}", dx=6, dy=5)


@picture(376, "Messages of rank 0 in a block with experts, data=2, expert=2, tensor=2")
def block_messages(p: Picture) -> None:
    """All messages of rank 0 in one block with experts on data=2, expert=2, tensor=2, in the order of forward."""
    tensor, expert, both = ("tensor 0 1", BLUE), ("expert 0 2", ORANGE), ("data×expert 0 2 4 6", GREEN)
    rows = (
        ("norm; q, k, v", None, ("all-reduce", tensor)), ("attention; o", ("all-reduce", tensor), None),
        ("norm; router", ("all-reduce", both), None),
        ("dispatch", ("all-to-all, twice", expert), ("all-to-all", expert)), ("experts", None, None),
        ("combine", ("all-to-all", expert), ("all-to-all", expert)),
    )  # fmt: skip
    for x, title in ((16, "block"), (136, "forward, down"), (286, "backward, up")):
        p.words(x, 22, title, "ink bold")
    for y, (name, *messages) in spaced(rows, 32, 42):
        p.frame(16, y, 108, 36, name, "line")
        for x, message in zip((136, 286), messages, strict=True):
            if message:
                op, (group, colour) = message
                p.box(x, y, 138, 36, colour)
                p.words(x + 69, y + 15, op, "in small", "middle")
                p.words(x + 69, y + 30, group, "in small", "middle")
    for y, name, group, colour in ((290, "dense gradients", *both), (324, "experts' gradients", "data 0 4", YELLOW)):
        p.words(16, y + 19, name, "ink")
        p.box(172, y, 252, 28, colour, f"all-reduce: {group}")
    p.words(16, 370, "numbers: the ranks that take part; below: once a step", "soft small")


@picture(290, "Gigabytes of a device with Llama 3 8B cut eightfold along each axis")
def axis_memory(p: Picture) -> None:
    """GB of the fullest rank of Llama 3 8B, split in eight along one axis, by the planner and without buffers."""
    job = jobs.Job(jobs.MODELS["8b"], 8, 8192, cluster("dgx-h100", 8))
    plans = (
        ("data", jobs.Plan(data=8)), ("data, FSDP", jobs.Plan(data=8, zero=3)), ("pipe", jobs.Plan(pipe=8)),
        ("tensor", jobs.Plan(tensor=8)),
    )  # fmt: skip
    p.words(16, 24, "GB per device, Llama 3 8B on 8 devices", "ink bold")
    rows, state_kinds = list[tuple[str, float, float]](), ("parameters", "gradients", "optimizer")
    for name, plan in plans:
        kinds = steps.memory(job, plan)
        rows.append((name, sum(kinds[kind] for kind in state_kinds) / 1e9, kinds["activations"] / 1e9))
    _, state, live = rows[0]  # the row of data, where a rank has one whole sequence
    rows.append(("context", state, live / 8))
    scale = 1.55
    for y, (name, state, live) in spaced(rows, 38, 46):
        p.words(16, y + 21, name, "ink")
        p.box(104, y, scale * state, 32, BLUE, f"{state:.0f}")
        p.box(104 + scale * state + 2, y, max(scale * live, 14), 32, ORANGE, f"{live:.0f}")
    p.words(16, 278, "blue: weights, gradients, state; orange: activations", "soft small")


Step = tuple[str, str, int]  # F, B, or its halves X and W, as in UNITS; micro-batch; start


def halves(micro_batches: int) -> list[list[Step]]:
    """The steps of each rank, with backward split into dX and dW.

    Forwards and dX follow 1F1B's order, each as early as possible. A rank computes a dW when it would otherwise wait,
    or when it keeps as many micro-batches as there are stages.
    """
    orders = [schedule_1f1b(r, STAGES, micro_batches) for r in range(STAGES)]
    ranks = [list[Step]() for _ in orders]
    ended = set[tuple[str, str, int]]()  # (kind, micro-batch, rank)
    now = 0
    while any(len(rank) < 3 * micro_batches for rank in ranks):
        started = list[tuple[str, str, int]]()
        for r, rank in enumerate(ranks):
            done = {kind: [name for what, name, _ in rank if what == kind] for kind in "FXW"}
            index = len(done["F"]) + len(done["X"])
            if index < len(orders[r]):
                action = orders[r][index]
                kind, before = ("F", r - 1) if action.kind == "forward" else ("X", r + 1)
                name = str(action.micro_batch)
                ready = not 0 <= before < STAGES or (kind, name, before) in ended
                if ready and (kind == "X" or len(done["F"]) - len(done["W"]) < STAGES):
                    rank.append((kind, name, now))
                    started.append((kind, name, r))
                    continue
            if len(done["W"]) < len(done["X"]):
                rank.append(("W", done["X"][len(done["W"])], now))
        now += 1
        ended.update(started)
    return ranks


DUAL = (  # DualPipe's ranks 0 and 1 of 4, 8 micro-batches: F, B, halves of B (X, W); a, b, … start at rank 3
    "F0 F1 F2 Fa Xa Wa Fb F3+Bb Fc+B0 Bc Fd+B1 Bd X2 W2 X3 W3",
    "F0 Fa F1 Fb F2 Ba Fc+B0 F3+Bb Fd+B1 Bc B2 Xd X3 Wd W3",
)
UNITS = {"F": 1, "B": 2, "X": 1, "W": 1}


def dual_pipe() -> list[list[Step]]:
    """The steps of four ranks by DUAL. Ranks 2 and 3 mirror ranks 1 and 0. Steps joined by + end together."""
    mirror = str.maketrans("0123abcd", "abcd0123")
    orders = [row.split() for row in (*DUAL, *(row.translate(mirror) for row in reversed(DUAL)))]
    ended: dict[tuple[str, str, int], int] = {}
    ranks, free = [list[Step]() for _ in orders], [0] * len(orders)
    while any(orders):
        for r, order in enumerate(orders):
            if not order:
                continue
            parts, needs = order[0].split("+"), list[tuple[str, str, int]]()
            for kind, name in parts:
                before = r - 1 if name.isdigit() == (kind == "F") else r + 1
                if kind != "W" and 0 <= before < len(orders):
                    needs.append(("F" if kind == "F" else "B", name, before))
            if all(need in ended for need in needs):
                now = max([free[r], *(ended[need] for need in needs)])
                free[r] = now + sum(UNITS[kind] for kind, _ in parts)
                for kind, name in parts:
                    ranks[r].append((kind, name, now))
                    now += UNITS[kind]
                    if kind != "W":
                        ended["F" if kind == "F" else "B", name, r] = free[r]
                order.pop(0)
    return ranks


@picture(426, "Four stages and eight micro-batches by 1F1B, in halves, and by DualPipe")
def zero_bubble(p: Picture) -> None:
    """Eight micro-batches by 1F1B, by 1F1B with backward in halves, and by DualPipe."""
    count = 8
    run = simulate("1f1b", count)
    plain = [
        [(action.kind[0].upper(), str(action.micro_batch), round(start)) for action, start in zip(*rank, strict=True)]
        for rank in zip(run.ranks, run.starts, strict=True)
    ]
    rows = (("1F1B", plain), ("in halves", halves(count)), ("DualPipe", dual_pipe()))
    unit, colours = 12.2, {"F": BLUE, "B": ORANGE, "X": ORANGE, "W": YELLOW}
    for top, (name, ranks) in spaced(rows, 22, 124):
        length = max(start + UNITS[kind] for rank in ranks for kind, _, start in rank)
        busy = 3 * count
        text = f"{name}: {length} units, idle/busy {length - busy}/{busy} = {(length - busy) / busy:.1%}"
        p.words(16, top, text.replace("%", " %"), "ink bold")
        for r, (y, rank) in enumerate(spaced(ranks, top + 8, 24)):
            p.words(16, y + 16, str(r), "soft small")
            p.frame(30, y, unit * length, 22, kind="faint")
            for kind, number, start in rank:
                x, w = 30 + unit * start, unit * UNITS[kind] - 1
                p.box(x, y, w, 22, colours[kind], hatched=kind == "W")
                p.words(x + w / 2, y + 16, number, "in small", "middle")
    p.words(16, 402, "rows: ranks; blue: forward; orange: backward, or dX alone;", "soft small")
    p.words(16, 418, "hatched: dW; letters: micro-batches that enter at rank 3", "soft small")
