"""Pictures of the chapter on ZeRO. Their numbers are computed."""

from typing import Literal

from lab.cluster.costs import ring_cost
from reference.zero.accounting import accounting

from .picture import BLUE, COLOURS, GREEN, GREY, ORANGE, YELLOW, Chart, Lane, Picture, picture, spaced

RANKS = 4
Method = Literal["none", "p_os", "zero2", "zero3"]
STAGES: tuple[tuple[str, Method], ...] = (
    ("data parallel", "none"), ("ZeRO-1", "p_os"), ("ZeRO-2", "zero2"), ("ZeRO-3, FSDP", "zero3"),
)  # fmt: skip
TENSORS = (9, 5, 4, 3, 2, 1)  # sizes in the worked example
LAYERS, LAYER_BYTES, COMPUTE_MS, ALPHA_S, BYTES_PER_S = 3, 16e6, 2.0, 20e-6, 10e9
GATHER_MS = 1e3 * ring_cost("all_gather", LAYER_BYTES / RANKS, RANKS, ALPHA_S, 1 / BYTES_PER_S)
Order = Literal["ddp", "late", "early", "zero3"]  # late: ZeRO-1 and 2 gather after the step; early: in the next forward


def bytes_per_parameter(method: Method, world: int, precision: str) -> list[float]:
    """Bytes of parameters, gradients and optimizer state on each rank, per parameter of the model."""
    size = 1024  # elements; divisible, so that all ranks hold the same number
    share = accounting([size], world, method=method, precision=precision)
    return [n / size for n in (share.parameters, share.gradients, share.optimizer)]


@picture(232, "Bytes a parameter on each of four ranks, float32 AdamW")
def shares(p: Picture) -> None:
    p.words(16, 24, "p: parameters, g: gradients, s: state", "soft")
    for y, (name, method) in spaced(STAGES, 52, 46):
        parts = bytes_per_parameter(method, RANKS, "float32")
        p.words(16, y, f"{name}: {sum(parts):g} bytes", "ink")
        words = [letter if n < 2 else f"{letter} {n:g}" for n, letter in zip(parts, "pgs", strict=True)]
        p.stack(16, y + 6, 24, zip(parts, (BLUE, GREEN, ORANGE), words, strict=True), 22)


@picture(312, "Bytes a parameter over the number of ranks, in mixed precision")
def growth(p: Picture) -> None:
    """Bytes per parameter over the number of ranks, in mixed precision."""
    worlds = [2**i for i in range(11)]
    c = Chart(p, (1, 1024), (0.01, 32))
    c.axes("ranks", "bytes per parameter on each rank", worlds[::2], (0.01, 0.1, 1, 16))
    looks = ((GREY, 12, -8), (ORANGE, 0, -8), (GREEN, 0, 20), (BLUE, -8, 10))
    for (name, method), (colour, dx, dy) in zip(STAGES, looks, strict=True):
        curve = [(w, sum(bytes_per_parameter(method, w, "mixed"))) for w in worlds]
        c.curve(curve, colour, dashed=method == "zero2")
        c.label(*curve[6], name, "end" if method == "zero3" else "start", dx, dy)


@picture(362, "What a step sends: data parallel, the paper's ZeRO-1, the one you write, ZeRO-2 and ZeRO-3")
def stages(p: Picture) -> None:
    """The messages of a step. An all-reduce is a reduce-scatter and an all-gather."""
    p.words(16, 24, "colour: (W − 1)/W · S bytes a rank sends, or 2 times that", "soft")
    rows = (
        ("data parallel: 2", (("reduce-scatter g", GREEN), ("all-gather g", GREEN), ("step: all", GREY))),
        ("ZeRO-1 of the paper: 2", (("reduce-scatter g", GREEN), ("step: a W-th", GREY), ("all-gather p", BLUE))),
        ("ZeRO-1 that you write: 3", (("all-reduce g: 2", GREEN), ("step: a W-th", GREY), ("broadcasts p", BLUE))),
        ("ZeRO-2: 2", (("reduce-scatter g", GREEN), ("step: a W-th", GREY), ("all-gather p", BLUE))),
        ("ZeRO-3: 3", (("all-gather p: 2", BLUE), ("reduce-scatter g", GREEN), ("step: a W-th", GREY))),
    )
    for y, (name, boxes) in spaced(rows, 54, 62):
        p.words(16, y, name, "ink bold")
        for x, (words, colour) in spaced(boxes, 16, 138):
            p.box(x, y + 8, 130, 28, colour, words)
            if x > 16:
                p.line(x - 8, y + 22, x, y + 22)


def owners(largest_first: bool) -> list[list[int]]:
    """Assign tensors to two ranks: largest first, to the rank with the least; or in turn. Return their sizes."""
    ranks: list[list[int]] = [[], []]
    for i, size in enumerate(TENSORS):
        target = min(ranks, key=sum) if largest_first else ranks[i % 2]
        target.append(size)
    return ranks


@picture(226, "Six tensors on two ranks: in turn, and the largest first to the rank that has least")
def packing(p: Picture) -> None:
    for top, title, largest_first in ((26, "in turn", False), (130, "largest first, to the rank with least", True)):
        p.words(16, top, title, "ink bold")
        for r, (y, sizes) in enumerate(spaced(owners(largest_first), top + 10, 34)):
            p.words(16, y + 19, f"rank {r}", "soft")
            end = p.stack(70, y, 19, [(size, COLOURS[r], str(size)) for size in sizes], 28)
            p.words(end + 8, y + 19, f"= {sum(sizes)}", "ink")


@picture(268, "Saving step 3 over step 2: whatever moment a process dies, one whole checkpoint is there")
def renames(p: Picture) -> None:
    """The operations that save a checkpoint, and the version that a reader finds if the process dies there."""
    steps = (
        ("write 3's data under new names, flush", "2"),
        ("wait for all ranks", "2"),
        ("write the new index beside the old, flush", "2"),
        ("os.replace: the index is the new one", "2 or 3"),
        ("remove 2's data", "3"),
    )
    p.words(16, 26, "operation", "soft")
    p.words(424, 26, "killed here, a reader finds", "soft", "end")
    for y, (words, found) in spaced(steps, 40, 44):
        p.box(16, y, 318, 34, YELLOW if "replace" in words else BLUE, words)
        p.box(350, y, 74, 34, ORANGE if "or" in found else GREEN, found)


@picture(348, "A layer of two weights on two ranks: shard, whole, shard, whole, shard of the gradient")
def turns(p: Picture) -> None:
    """The weights of one layer that each of two ranks holds during a step, and its messages."""
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
            for part, name in enumerate(("w₀", "w₁")):
                present = kept == "all" or part == rank
                p.box(x + w * part, y, w - 4, 26, BLUE if present else None, name if present else "")
            for left, number in spaced(gradients[rank].split() if gradients else (), x, w):
                present = number != "·"
                p.box(left, y + 30, w - 4, 26, ORANGE if present else None, number if present else "")
        y += 60 if gradients else 30
        if i < len(sent):
            p.words(xs[0], y + 13, sent[i], "soft small")
            y += 24


def memory_over_step(method: Method, layers: int = 6) -> list[tuple[float, float, float]]:
    """Parameters, gradients and float32 AdamW state that a rank holds, in units of a layer's parameters.

    There is one entry per layer in forward and in backward, and one before and after. Messages are not prefetched.
    """
    p, g, s = (layers / 4 * n for n in bytes_per_parameter(method, RANKS, "float32"))
    at_work = p + (method == "zero3")
    backward = [(at_work, 1 + done * g / layers, s) for done in range(layers)]
    return [(p, 0, s), *[(at_work, 0.0, s)] * layers, *backward, (p, g, s)]


@picture(442, "Parameters, gradients and state held in a step of six layers on four ranks, by four methods")
def memory(p: Picture) -> None:
    p.words(16, 22, "held, in layers; blue parameters, green gradients, orange state", "soft small")
    left, width, unit, top = 24.0, 27.0, 4.4, 46.0
    for name, method in STAGES:
        moments = memory_over_step(method)
        highest = max(sum(parts) for parts in moments)
        p.words(16, top, f"{name}: at most {highest:g} layers", "ink bold")
        bottom = top + 8 + unit * highest
        for x, (parameters, gradients, state) in spaced(moments, left, width):
            y = bottom
            for amount, colour in ((state, ORANGE), (parameters, BLUE), (gradients, GREEN)):
                y -= unit * amount
                p.box(x, y, width - 3, max(unit * amount - 1, 0), colour)
        top = bottom + 24
    for name, first, many in (("rest", 0, 1), ("forward", 1, 6), ("backward", 7, 6), ("step", 13, 1)):
        p.line(left + width * first, top - 14, left + width * (first + many) - 3, top - 14)
        p.words(left + width * (first + many / 2) - 1, top + 4, name, "soft small", "middle")


@picture(262, "The views that autograd saved stay; the storage below them is emptied and filled again")
def storage(p: Picture) -> None:
    """Views over a storage that is filled and emptied."""
    for x, (title, filled) in spaced((("forward", True), ("between", False), ("backward", True)), 16, 140):
        p.words(x, 26, title, "ink bold")
        for left, name in ((x, "weight"), (x + 66, "bias")):
            p.box(left, 40, 60, 30, YELLOW, name)
            p.line(left + 30, 72, left + 30, 100, dashed=not filled, arrow=True)
        p.box(x, 104, 126, 34, BLUE if filled else None, "full: W · n" if filled else "0 bytes")
        p.box(x, 196, 34, 30, GREEN, "n")
        p.words(x + 42, 216, "shard", "soft")
        if filled:
            p.line(x + 17, 192, x + 17, 142, arrow=True)
            p.words(x + 26, 172, "all-gather", "soft small")
    p.words(16, 250, "yellow: views, saved by autograd, with shapes and strides", "soft")


def gathers(ahead: bool) -> tuple[Lane, Lane]:
    """Lanes of compute and messages of a forward pass, in ms. Layers are gathered when needed, or one layer ahead."""
    compute, messages, start = Lane(), Lane(), 0.0
    for layer in range(1, LAYERS + 1):
        messages.add(start if ahead else compute.end, GATHER_MS, str(layer))
        start = compute.add(messages.end, COMPUTE_MS, f"layer {layer}")
    return compute, messages


@picture(222, "Forward of three layers: gathered when needed, and one layer ahead")
def prefetch(p: Picture) -> None:
    ms = 38.0
    p.words(16, 22, "upper lane: computes; lower lane: gathers", "soft")
    p.lanes(48, "gathered when needed", ms, *gathers(ahead=False))
    p.lanes(126, "one layer ahead", ms, *gathers(ahead=True))
    p.clock(194, ms, 10)


Host = Literal["ahead", "waits", "asks early"]
LAUNCH_MS = 0.3  # that a host needs to launch all kernels of a layer


def hosted(host: Host) -> tuple[Lane, Lane, Lane, Lane]:
    """Lanes of a forward of three layers, in ms: the host's launches, the host's waits, compute, gathers.

    The host launches a layer's gather, then its kernels. With "waits" it then waits until the layer is computed. With
    "asks early" it waits too, but launches the next layer's gather before this layer's kernels.
    """
    asks, waits, compute, messages = Lane(), Lane(), Lane(), Lane()
    now = 0.0
    for layer in range(1, LAYERS + 1):
        for requested in range(len(messages) + 1, min(LAYERS, layer + (host == "asks early")) + 1):
            messages.add(now, GATHER_MS, str(requested))
        compute.add(max(now, messages[layer - 1][0] + GATHER_MS), COMPUTE_MS, f"layer {layer}")
        asks.add(now, LAUNCH_MS)
        now += LAUNCH_MS
        if host != "ahead":
            waits.add(now, compute.end - now, "waits")
            now = compute.end
    return asks, waits, compute, messages


@picture(406, "Forward of three layers: the host asks, one stream computes, another gathers")
def streams(p: Picture) -> None:
    """The host, the compute stream and the stream of gathers, if the host runs ahead and if it waits."""
    left, ms = 78.0, 34.0
    rows: tuple[tuple[str, Host], ...] = (
        ("the host runs ahead", "ahead"), ("the host waits for each layer", "waits"),
        ("it waits, and asks one layer early", "asks early"),
    )  # fmt: skip
    for top, (name, host) in spaced(rows, 26, 118):
        asks, waits, compute, messages = hosted(host)
        p.words(16, top, f"{name}: {compute.end:.1f} ms", "ink bold")
        lanes = (("host", asks, YELLOW), ("computes", compute, BLUE), ("gathers", messages, ORANGE))
        for y, (lane, bars, colour) in spaced(lanes, top + 8, 28):
            p.words(16, y + 17, lane, "soft small")
            for start, length, words in bars:
                p.box(left + ms * start, y, ms * length - 1.5, 24, colour, words)
        for start, length, words in waits:
            p.frame(left + ms * start, top + 9, ms * length - 3, 22, words)
    p.clock(376, ms, 10, left=left)


def step_lanes(order: Order) -> tuple[Lane, Lane]:
    """Lanes of compute and messages of a step, in ms. Backward takes twice as long as forward, the optimizer no time.

    A link carries one message at a time, in the order of requests. ZeRO-3 gathers one layer ahead, and keeps the last
    layer gathered between forward and backward.
    """
    compute, messages = Lane(), Lane()

    def send(what: str, ready: float, times: int = 1) -> float:
        messages.add(ready, times * GATHER_MS, what)
        return messages.end

    layers, arrival = range(1, LAYERS + 1), dict.fromkeys(range(1, LAYERS + 1), 0.0)
    if order == "early":
        arrival = {layer: send(f"p{layer}", 0.0) for layer in layers}
    if order == "zero3":
        arrival[1] = send("p1", 0.0)
    for layer in layers:
        start = compute.add(arrival[layer], COMPUTE_MS, f"f{layer}")
        if order == "zero3" and layer < LAYERS:
            arrival[layer + 1] = send(f"p{layer + 1}", start)
    for layer in reversed(layers):
        start = compute.add(arrival[layer], 2 * COMPUTE_MS, f"b{layer}")
        if order == "zero3":
            if layer > 1:  # the gather is requested before the reduce-scatter of the layer above
                arrival[layer - 1] = send(f"p{layer - 1}", start)
            if layer < LAYERS:
                send(f"g{layer + 1}", start)
        else:
            send(f"g{layer}", compute.end, 2 if order == "ddp" else 1)
    if order == "zero3":
        send("g1", compute.end)
    if order == "late":
        for layer in layers:
            send(f"p{layer}", compute.end)
    return compute, messages


@picture(414, "What overlaps with what in a step: DDP, ZeRO-1 and 2, ZeRO-3")
def hidden(p: Picture) -> None:
    """A step by DDP, ZeRO-1 and 2, and ZeRO-3: messages that overlap with compute, and exposed messages."""
    ms = 17.4
    p.words(16, 22, "upper lane: computes; lower lane: the link; ms exposed", "soft")
    rows: tuple[tuple[str, Order], ...] = (
        ("DDP", "ddp"), ("ZeRO-1 and 2, gathers after the step", "late"),
        ("ZeRO-1 and 2, gathers under forward", "early"), ("ZeRO-3", "zero3"),
    )  # fmt: skip
    for top, (name, order) in spaced(rows, 48, 80):
        compute, messages = step_lanes(order)
        exposed = max(compute.end, messages.end) - sum(length for _, length, _ in compute)  # time without compute
        p.words(16, top, f"{name}: {exposed:.1f} ms", "ink bold")
        for start, length, what in compute:
            p.box(16 + ms * start, top + 8, ms * length - 1.5, 24, BLUE if what[0] == "f" else GREEN, what)
        for start, length, what in messages:
            under = any(begin < start + length and start < begin + duration for begin, duration, _ in compute)
            colour = YELLOW if what[0] == "p" else ORANGE
            p.box(16 + ms * start, top + 34, ms * length - 1.5, 24, colour, hatched=not under)
            p.words(16 + ms * (start + length / 2), top + 51, what, "in small", "middle")
    p.clock(350, ms, 23, step=4)
    p.words(16, 388, "f, b: forward, backward of a layer; p: its parameters", "soft small")
    p.words(16, 406, "gathered; g: its gradient reduced; hatched: nothing computes", "soft small")


@picture(332, "Two machines of four ranks: parameters sharded over all eight, and sharded in each machine")
def hybrid(p: Picture) -> None:
    """The part of the parameters that each rank holds, with FSDP over all ranks and with HSDP."""
    for top, (name, parts) in spaced((("ZeRO-3 over all ranks", 8), ("HSDP: ZeRO-3 in each machine", 4)), 24, 160):
        p.words(16, top, name, "ink bold")
        for machine, (y, _) in enumerate(spaced("ab", top + 10, 66)):
            p.frame(16, y, 408, 50)
            p.words(28, y + 30, f"machine {machine}", "soft small")
            for rank, (x, _) in enumerate(spaced("abcd", 104, 80)):
                part = (4 * machine + rank) % parts
                p.box(x, y + 9, 66, 32, COLOURS[part % len(COLOURS)], f"part {part + 1}", hatched=part > 3)
                if machine and parts == 4:
                    p.line(x + 33, y - 25, x + 33, y + 9)
