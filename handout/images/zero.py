"""The pictures of the chapter on ZeRO. What is a number in them is computed."""

from typing import Literal

from lab.cluster.costs import ring_cost
from reference.zero.accounting import accounting

from .picture import BLUE, GREEN, GREY, ORANGE, YELLOW, Bar, Chart, Picture, picture

RANKS = 4
Method = Literal["none", "p_os", "zero2", "zero3"]
STAGES: tuple[tuple[str, Method], ...] = (
    ("data parallel", "none"), ("ZeRO-1", "p_os"), ("ZeRO-2", "zero2"), ("ZeRO-3, FSDP", "zero3"),
)  # fmt: skip
TENSORS = (9, 5, 4, 3, 2, 1)  # of the worked example
LAYERS, LAYER_BYTES, COMPUTE_MS, ALPHA_S, BYTES_PER_S = 3, 16e6, 2.0, 20e-6, 10e9
Order = Literal["ddp", "late", "early", "zero3"]  # ZeRO-1 and 2 gather after the step, or under the next forward


@picture(232, "Bytes a parameter on each of four ranks, float32 AdamW")
def shares(p: Picture) -> None:
    p.words(16, 24, "p: parameters, g: gradients, s: state", "soft")
    for i, (name, method) in enumerate(STAGES):
        x, y, byte = 16.0, 52 + 46 * i, 24.0
        share = accounting([RANKS], RANKS, method=method, precision="float32")  # so that n elements are one
        parts = [n / RANKS for n in (share.parameters, share.gradients, share.optimizer)]
        p.words(x, y, f"{name}: {sum(parts):g} bytes", "ink")
        for n, colour, letter in zip(parts, (BLUE, GREEN, ORANGE), "pgs", strict=True):
            p.box(x, y + 6, n * byte - 2, 22, colour, letter if n < 2 else f"{letter} {n:g}")
            x += n * byte


@picture(312, "Bytes a parameter over the number of ranks, in mixed precision")
def growth(p: Picture) -> None:
    """Bytes a parameter over the number of ranks, mixed precision."""
    worlds = [2**i for i in range(11)]
    c = Chart(p, (1, 1024), (0.01, 32))
    named_x, named_y = {w: f"{w:,}" for w in (1, 4, 16, 64, 256, 1024)}, {0.01: "0.01", 0.1: "0.1", 1: "1", 16: "16"}
    c.axes("ranks", "bytes per parameter on each rank", dict(named_x), named_y)
    looks = ((GREY, 12, -8), (ORANGE, 0, -8), (GREEN, 0, 20), (BLUE, -8, 10))
    for (name, method), (colour, dx, dy) in zip(STAGES, looks, strict=True):
        size = 1024  # elements: every rank has as many
        curve = [(w, accounting([size], w, method=method, precision="mixed").total / size) for w in worlds]
        c.curve(curve, colour, dashed=method == "zero2")
        c.say(*curve[6], name, "end" if method == "zero3" else "start", dx, dy)


@picture(362, "What a step sends: data parallel, the paper's ZeRO-1, the one you write, ZeRO-2 and ZeRO-3")
def stages(p: Picture) -> None:
    """The messages of a step: an all-reduce is a reduce-scatter and an all-gather."""
    p.words(16, 24, "colour: (W − 1)/W · S bytes a rank sends, or 2 times that", "soft")
    rows = (
        ("data parallel: 2", (("reduce-scatter g", GREEN), ("all-gather g", GREEN), ("step: all", GREY))),
        ("ZeRO-1 of the paper: 2", (("reduce-scatter g", GREEN), ("step: a W-th", GREY), ("all-gather p", BLUE))),
        ("ZeRO-1 that you write: 3", (("all-reduce g: 2", GREEN), ("step: a W-th", GREY), ("broadcasts p", BLUE))),
        ("ZeRO-2: 2", (("reduce-scatter g", GREEN), ("step: a W-th", GREY), ("all-gather p", BLUE))),
        ("ZeRO-3: 3", (("all-gather p: 2", BLUE), ("reduce-scatter g", GREEN), ("step: a W-th", GREY))),
    )
    for i, (name, boxes) in enumerate(rows):
        y = 54 + 62 * i
        p.words(16, y, name, "ink bold")
        for j, (words, colour) in enumerate(boxes):
            p.box(16 + 138 * j, y + 8, 130, 28, colour, words)
            if j:
                p.line(16 + 138 * j - 8, y + 22, 16 + 138 * j, y + 22)


def owners(largest_first: bool) -> list[list[int]]:
    """Tensors of two ranks: the largest first to the rank that has least, or in turn."""
    ranks: list[list[int]] = [[], []]
    for at, size in enumerate(TENSORS):
        least = min(ranks, key=sum) if largest_first else ranks[at % 2]
        least.append(size)
    return ranks


@picture(226, "Six tensors on two ranks: in turn, and the largest first to the rank that has least")
def packing(p: Picture) -> None:
    for i, (title, largest_first) in enumerate((("in turn", False), ("largest first, to the rank with least", True))):
        top = 26 + 104 * i
        p.words(16, top, title, "ink bold")
        for r, sizes in enumerate(owners(largest_first)):
            x, y = 70.0, top + 10 + 34 * r
            p.words(16, y + 19, f"rank {r}", "soft")
            for size in sizes:
                p.box(x, y, 19 * size - 2, 28, (BLUE, ORANGE)[r], str(size))
                x += 19 * size
            p.words(x + 8, y + 19, f"= {sum(sizes)}", "ink")


@picture(268, "Saving step 3 over step 2: whatever moment a process dies, one whole checkpoint is there")
def renames(p: Picture) -> None:
    """A checkpoint's order of operations, and what a reader finds if the process dies there."""
    steps = (
        ("write 3's data under new names, flush", "2"),
        ("wait for all ranks", "2"),
        ("write the new index beside the old, flush", "2"),
        ("os.replace: the index is the new one", "2 or 3"),
        ("remove 2's data", "3"),
    )
    p.words(16, 26, "operation", "soft")
    p.words(424, 26, "killed here, a reader finds", "soft", "end")
    for i, (words, found) in enumerate(steps):
        y = 40 + 44 * i
        p.box(16, y, 318, 34, YELLOW if "replace" in words else BLUE, words)
        p.box(350, y, 74, 34, ORANGE if "or" in found else GREEN, found)


@picture(348, "A layer of two weights on two ranks: shard, whole, shard, whole, shard of the gradient")
def turns(p: Picture) -> None:
    """One layer of two weights on two ranks, from one rest to the next: what a rank holds of it, and sends."""
    moments = (
        ("at rest", "own", ()), ("forward", "all", ()), ("between", "own", ()), ("backward", "all", ("3 1", "5 2")),
        ("afterwards", "own", ("4 ·", "· 1.5")),
    )  # fmt: skip
    sent = ("all-gather", "free", "all-gather", "reduce-scatter, free")
    xs, w = (110.0, 280.0), 66.0
    for rank, x in enumerate(xs):
        p.words(x + w, 22, f"rank {rank}", "ink bold", "middle")
    y = 34.0
    for i, (name, kept, gradients) in enumerate(moments):
        p.words(16, y + 18, name, "ink")
        for rank, x in enumerate(xs):
            for part in range(2):
                if kept == "all" or part == rank:
                    p.box(x + w * part, y, w - 4, 26, BLUE, f"w{'₀₁'[part]}")
                else:
                    p.frame(x + w * part, y, w - 4, 26)
            for part, number in enumerate(gradients[rank].split() if gradients else ()):
                if number == "·":
                    p.frame(x + w * part, y + 30, w - 4, 26)
                else:
                    p.box(x + w * part, y + 30, w - 4, 26, ORANGE, number)
        y += 60 if gradients else 30
        if i < len(sent):
            p.words(xs[0], y + 13, sent[i], "soft small")
            y += 24


def held(layers: int = 6) -> list[tuple[str, float, float]]:
    """(moment, with FSDP, with data parallelism): parameters and gradients held, in layers; a moment a layer."""
    moments = [("rest", layers / RANKS, float(layers))]
    for _ in range(layers):
        moments.append(("forward", layers / RANKS + 1, float(layers)))
    for done in range(layers):
        moments.append(("backward", layers / RANKS + done / RANKS + 2, float(layers + done + 1)))
    moments.append(("rest", 2 * layers / RANKS, 2.0 * layers))
    return moments


@picture(300, "Parameters and gradients held in a step of six layers on four ranks")
def memory(p: Picture) -> None:
    left, bottom, width, unit = 40.0, 236.0, 27.0, 16.0
    p.words(16, 24, "held, in layers: grey data parallel, blue FSDP", "soft")
    moments = held()
    for i, (_, fsdp, whole) in enumerate(moments):
        x = left + width * i
        p.box(x, bottom - unit * whole, width - 3, unit * whole, GREY)
        p.box(x, bottom - unit * fsdp, width - 3, unit * fsdp, BLUE)
    for value in (0, 6, 12):
        p.words(left - 6, bottom - unit * value + 5, str(value), "soft small", "end")
    p.line(left, bottom, left + width * len(moments), bottom)
    for name, first, many in (("forward", 1, 6), ("backward", 7, 6)):
        p.line(left + width * first, bottom + 8, left + width * (first + many) - 3, bottom + 8)
        p.words(left + width * (first + many / 2), bottom + 26, name, "soft", "middle")
    peak = max(fsdp for _, fsdp, _ in moments), max(whole for _, _, whole in moments)
    p.words(16, 290, f"at most: {peak[1]:g} layers, and {peak[0]:g} with FSDP on {RANKS} ranks", "ink")


@picture(262, "The views that autograd saved stay; the storage below them is emptied and filled again")
def storage(p: Picture) -> None:
    """Views over a storage that comes and goes."""
    for i, (title, there) in enumerate((("forward", True), ("between", False), ("backward", True))):
        x = 16 + 140 * i
        p.words(x, 26, title, "ink bold")
        for j, name in enumerate(("weight", "bias")):
            p.box(x + 66 * j, 40, 60, 30, YELLOW, name)
            p.line(x + 66 * j + 30, 72, x + 66 * j + 30, 100, dashed=not there, arrow=True)
        if there:
            p.box(x, 104, 126, 34, BLUE, "full: W · n")
        else:
            p.frame(x, 104, 126, 34, "0 bytes")
        p.box(x, 196, 34, 30, GREEN, "n")
        p.words(x + 42, 216, "shard", "soft")
        if there:
            p.line(x + 17, 192, x + 17, 142, arrow=True)
            p.words(x + 26, 172, "all-gather", "soft small")
    p.words(16, 250, "yellow: views, saved by autograd, with shapes and strides", "soft")


def gathers(ahead: bool) -> tuple[list[tuple[float, float, str]], list[tuple[float, float, str]]]:
    """Compute and messages of a forward pass, in ms: each layer is gathered when it is needed, or one ahead."""
    cost = 1e3 * ring_cost("all_gather", LAYER_BYTES / RANKS, RANKS, ALPHA_S, 1 / BYTES_PER_S)
    compute, messages = list[tuple[float, float, str]](), list[tuple[float, float, str]]()
    free = begin = 0.0
    for layer in range(1, LAYERS + 1):
        issued = max(free, begin) if ahead else (compute[-1][0] + COMPUTE_MS if compute else 0.0)
        messages.append((issued, cost, f"{layer}"))
        free = issued + cost
        begin = max(free, compute[-1][0] + COMPUTE_MS if compute else 0.0)
        compute.append((begin, COMPUTE_MS, f"layer {layer}"))
    return compute, messages


@picture(222, "Forward of three layers: gathered when needed, and one layer ahead")
def prefetch(p: Picture) -> None:
    ms = 38.0
    p.words(16, 22, "upper lane: computes; lower lane: gathers", "soft")
    p.lanes(48, "gathered when needed", ms, *gathers(ahead=False))
    p.lanes(126, "one layer ahead", ms, *gathers(ahead=True))
    p.clock(194, ms, 10)


Host = Literal["ahead", "waits", "asks early"]
ASK_MS = 0.3  # that a host needs to ask for all of a layer


def hosted(host: Host) -> tuple[list[Bar], list[Bar], list[Bar], list[Bar]]:
    """Forward of three layers by a host and two streams, in ms: asks, waits of the host, computes, gathers.

    The host asks for a layer's gather and then for its kernels. A host that waits does so until the layer has computed,
    and asks only then for the next one, or has asked for the next gather before these kernels.
    """
    cost = 1e3 * ring_cost("all_gather", LAYER_BYTES / RANKS, RANKS, ALPHA_S, 1 / BYTES_PER_S)
    asks, waits, compute, messages = list[Bar](), list[Bar](), list[Bar](), list[Bar]()
    now = 0.0

    def gather(layer: int) -> None:
        before = messages[-1][0] + messages[-1][1] if messages else 0.0
        messages.append((max(now, before), cost, str(layer)))

    for layer in range(1, LAYERS + 1):
        for asked in range(len(messages) + 1, min(LAYERS, layer + (host == "asks early")) + 1):
            gather(asked)
        here = messages[layer - 1][0] + cost
        done = compute[-1][0] + COMPUTE_MS if compute else 0.0
        compute.append((max(now, here, done), COMPUTE_MS, f"layer {layer}"))
        asks.append((now, ASK_MS, ""))
        now += ASK_MS
        if host != "ahead":
            end = compute[-1][0] + COMPUTE_MS
            waits.append((now, end - now, "waits"))
            now = end
    return asks, waits, compute, messages


@picture(406, "Forward of three layers: the host asks, one stream computes, another gathers")
def streams(p: Picture) -> None:
    """Who asks, who computes and who gathers: with a host that runs ahead, and with one that waits."""
    left, ms = 78.0, 34.0
    rows: tuple[tuple[str, Host], ...] = (
        ("the host runs ahead", "ahead"), ("the host waits for each layer", "waits"),
        ("it waits, and asks one layer early", "asks early"),
    )  # fmt: skip
    for i, (name, host) in enumerate(rows):
        asks, waits, compute, messages = hosted(host)
        top = 26.0 + 118 * i
        p.words(16, top, f"{name}: {compute[-1][0] + COMPUTE_MS:.1f} ms", "ink bold")
        lanes = (("host", asks, YELLOW), ("computes", compute, BLUE), ("gathers", messages, ORANGE))
        for j, (lane, bars, colour) in enumerate(lanes):
            y = top + 8 + 28 * j
            p.words(16, y + 17, lane, "soft small")
            for start, long, words in bars:
                p.box(left + ms * start, y, ms * long - 1.5, 24, colour, words)
        for start, long, words in waits:
            p.frame(left + ms * start, top + 9, ms * long - 3, 22, words)
    p.line(left, 376, left + ms * 10.3, 376, arrow=True)
    for at in range(0, 11, 2):
        p.line(left + ms * at, 376, left + ms * at, 381)
        p.words(left + ms * at, 396, str(at) if at else "0 ms", "soft small", "middle" if at else "start")


def whole_step(order: Order, forward_ms: float = COMPUTE_MS) -> tuple[list[Bar], list[Bar]]:
    """Compute and messages of a step, in ms; a backward takes two forwards, the optimizer's step nothing.

    A link carries one message at a time, in the order in which they are asked for. ZeRO-3 keeps the last layer whole
    between forward and backward, and gathers one layer ahead.
    """
    one = 1e3 * ring_cost("all_gather", LAYER_BYTES / RANKS, RANKS, ALPHA_S, 1 / BYTES_PER_S)
    compute, messages = list[Bar](), list[Bar]()

    def send(what: str, asked: float, times: int = 1) -> float:
        start = max(asked, messages[-1][0] + messages[-1][1] if messages else 0.0)
        messages.append((start, times * one, what))
        return start + times * one

    def work(what: str, needs: float, long: float) -> float:
        start = max(needs, compute[-1][0] + compute[-1][1] if compute else 0.0)
        compute.append((start, long, what))
        return start

    layers, here = range(1, LAYERS + 1), dict.fromkeys(range(1, LAYERS + 1), 0.0)
    if order == "early":
        here = {layer: send(f"p{layer}", 0.0) for layer in layers}
    if order == "zero3":
        here[1] = send("p1", 0.0)
    for layer in layers:
        start = work(f"f{layer}", here[layer], forward_ms)
        if order == "zero3" and layer < LAYERS:
            here[layer + 1] = send(f"p{layer + 1}", start)
    done = 0.0
    for layer in reversed(layers):
        start = work(f"b{layer}", here[layer], 2 * forward_ms)
        if order == "zero3":
            if layer > 1:  # the gather is asked for before the reduce-scatter of the layer above
                here[layer - 1] = send(f"p{layer - 1}", start)
            if layer < LAYERS:
                done = send(f"g{layer + 1}", start)
        else:
            done = send(f"g{layer}", start + 2 * forward_ms, 2 if order == "ddp" else 1)
    if order == "zero3":
        done = send("g1", start + 2 * forward_ms)
    if order == "late":
        for layer in layers:
            send(f"p{layer}", done)
    return compute, messages


def exposed(compute: list[Bar], messages: list[Bar]) -> float:
    """The part of a step in which nothing computes, in ms."""
    return max(start + long for start, long, _ in (*compute, *messages)) - sum(long for _, long, _ in compute)


@picture(414, "What overlaps with what in a step: DDP, ZeRO-1 and 2, ZeRO-3")
def hidden(p: Picture) -> None:
    """A whole step by DDP, ZeRO-1 and 2, and ZeRO-3: what travels under compute, and what sticks out."""
    ms = 17.4
    p.words(16, 22, "upper lane: computes; lower lane: the link; ms exposed", "soft")
    rows: tuple[tuple[str, Order], ...] = (
        ("DDP", "ddp"), ("ZeRO-1 and 2, gathers after the step", "late"),
        ("ZeRO-1 and 2, gathers under forward", "early"), ("ZeRO-3", "zero3"),
    )  # fmt: skip
    for i, (name, order) in enumerate(rows):
        compute, messages = whole_step(order)
        top = 48 + 80 * i
        p.words(16, top, f"{name}: {exposed(compute, messages):.1f} ms", "ink bold")
        for start, long, what in compute:
            p.box(16 + ms * start, top + 8, ms * long - 1.5, 24, BLUE if what[0] == "f" else GREEN, what)
        for start, long, what in messages:
            under = any(at < start + long and start < at + ran for at, ran, _ in compute)
            colour = YELLOW if what[0] == "p" else ORANGE
            p.box(16 + ms * start, top + 34, ms * long - 1.5, 24, colour, hatched=not under)
            p.words(16 + ms * (start + long / 2), top + 51, what, "in small", "middle")
    p.line(16, 350, 16 + ms * 23.6, 350, arrow=True)
    for at in range(0, 24, 4):
        p.line(16 + ms * at, 350, 16 + ms * at, 355)
        p.times(369, ms, [at], "ms")
    p.words(16, 388, "f, b: forward, backward of a layer; p: its parameters", "soft small")
    p.words(16, 406, "gathered; g: its gradient reduced; hatched: nothing computes", "soft small")
