"""Pictures of the chapter on meshes: the cost of a step, by the exercise accounting, and the zero-bubble schedule."""

from __future__ import annotations

from lab.model.transformer import MODELS
from reference.mesh.accounting import Cost, Degrees, Device, Workload, accounting, layer_times
from reference.mesh.schedule_1f1b import schedule_1f1b

from .mesh import MICRO_BATCHES, STAGES, played
from .picture import BLUE, GREEN, GREY, ORANGE, WIDTH, YELLOW, Chart, Picture


def costs() -> Cost:
    """A 70-billion model on 1,024 ranks, the stage in the middle."""
    work = Workload(MODELS["70b"], sequences=1024, context=4096, micro_batches=32)
    return accounting(work, Degrees(data=16, pipe=8, tensor=8), stage=3)


def axes_bytes() -> Picture:
    """What a rank sends along each axis in a step."""
    sent = costs().bytes
    p = Picture(
        "axes_bytes", WIDTH, 206, "Gigabytes that a rank sends along each axis in a step of the 70-billion model"
    )
    p.words(16, 24, "GB per rank and step, data=16, pipe=8, tensor=8", "soft")
    for i, (axis, colour) in enumerate((("tensor", BLUE), ("pipe", GREEN), ("data×expert", ORANGE))):
        gigabytes, y = sent[axis] / 1e9, 40 + 48 * i
        w = 250 * sent[axis] / sent["tensor"]
        p.words(16, y + 22, "data" if "×" in axis else axis, "ink")
        p.box(76, y, max(w, 3), 34, colour)
        p.words(84 + w, y + 22, f"{gigabytes:,.1f} GB", "ink small")
    p.words(16, 196, "tensor: 4 all-reduces a block; pipe: 2 messages; data: once", "soft small")
    return p


def floors() -> Picture:
    """Why a planner may stop: floors rise, and no price lies below its floor."""
    plans = ((1.0, 1.9), (1.2, 1.4), (1.3, 2.0), (1.7, 1.8), (2.1, None), (2.2, None))
    p = Picture("floors", WIDTH, 288, "Six plans in the order of their floors; pricing stops at the fourth")
    bottom, unit, best = 234.0, 84.0, 1.4
    for i, (floor, price) in enumerate(plans):
        x = 64 + 60 * i
        if price is not None and i < 3:
            p.box(x, bottom - unit * price, 44, unit * (price - floor), ORANGE)
            p.words(x + 22, bottom - unit * price + 14, f"{price}", "in small", "middle")
        p.box(x, bottom - unit * floor, 44, unit * floor, BLUE if i < 3 else GREY, f"{floor}")
        p.words(x + 22, bottom + 18, f"plan {i + 1}", "soft small", "middle")
    p.line(50, bottom - unit * best, 424, bottom - unit * best, dashed=True)
    p.words(16, bottom - unit * best + 5, f"{best}", "ink small")
    p.words(16, 24, "floor (blue, grey) and price (orange), s; dashed: the best", "soft")
    p.words(16, 278, "plan 4's floor is above the best price: nothing behind can win", "ink small")
    return p


def limits() -> Picture:
    """Seconds of a layer's products and messages over the tokens of a data rank: equations (9) to (11)."""
    p = Picture("limits", WIDTH, 300, "Seconds of a layer's products and messages over the tokens of a data rank")
    c = Chart(p, (500, 64_000), (5e-5, 5e-2))
    named = {500: "500", 2000: "2,000", 8750: "8,750", 32000: "32,000"}
    c.axes("tokens of a data rank", "ms, forward of a layer", named, {1e-4: "0.1", 1e-3: "1", 1e-2: "10"})
    device, tokens = Device(1e15, 1e11), [500 * 2 ** (i / 4) for i in range(29)]
    times = [layer_times(8 * n, 8192, 16384, data=8, tensor=2, device=device) for n in tokens]
    for name, colour, dashed in (("compute", BLUE, False), ("data", ORANGE, True), ("tensor", GREEN, True)):
        c.curve([(n, getattr(t, f"{name}_s")) for n, t in zip(tokens, times, strict=True)], colour, dashed)
    c.say(16_000, times[20].compute_s, "compute", "end", dx=-8, dy=-14)
    c.say(600, times[0].data_s, "data: weights", dy=-10)
    c.say(4_000, times[12].tensor_s, "tensor: activations", dx=12, dy=14)
    c.dot(8_750, layer_times(70_000, 8192, 16384, data=8, tensor=2, device=device).compute_s, GREY)
    return p


def halves(stages: int = STAGES, micro_batches: int = MICRO_BATCHES) -> list[list[tuple[str, int, int]]]:
    """Of each rank: (what, micro-batch, start), each a unit long, with backward cut into dX and dW.

    Forwards and dX follow 1F1B's order, as soon as they can. A rank does a dW where it would wait, or where it keeps
    as many micro-batches as there are stages.
    """
    orders = [schedule_1f1b(r, stages, micro_batches) for r in range(stages)]
    ranks = [list[tuple[str, int, int]]() for _ in range(stages)]
    ended: dict[tuple[str, int, int], int] = {}  # by (kind, micro-batch, rank)
    now = 0
    while any(len(rank) < 3 * micro_batches for rank in ranks):
        begun = []
        for r, rank in enumerate(ranks):
            done = [[i for what, i, _ in rank if what == kind] for kind in ("forward", "dX", "dW")]
            place = len(done[0]) + len(done[1])
            if place < len(orders[r]):
                action = orders[r][place]
                needs = (action.kind, action.micro_batch, r + (-1 if action.kind == "forward" else 1))
                ready = not 0 <= needs[2] < stages or ended.get(needs, now + 1) <= now
                if ready and (action.kind == "backward" or len(done[0]) - len(done[2]) < stages):
                    rank.append(("forward" if action.kind == "forward" else "dX", action.micro_batch, now))
                    begun.append((action.kind, action.micro_batch, r))
                    continue
            if len(done[2]) < len(done[1]):
                rank.append(("dW", done[1][len(done[2])], now))
        now += 1
        ended |= dict.fromkeys(begun, now)
    return ranks


def zero_bubble() -> Picture:
    """The work of the worked example with backward in two halves."""
    ranks = halves()
    length = max(start + 1 for rank in ranks for _, _, start in rank)
    p = Picture("zero_bubble", WIDTH, 176, "Four stages and six micro-batches with backward cut in two halves")
    p.words(16, 24, f"backward in two halves: {length}; 1F1B: {played('1f1b').length:g}", "ink bold")
    unit, colours = 18.6, {"forward": BLUE, "dX": ORANGE, "dW": YELLOW}
    for r, rank in enumerate(ranks):
        y = 32 + 28 * r
        p.words(16, y + 17, str(r), "soft small")
        p.frame(30, y, unit * length, 25, kind="faint")
        for what, micro_batch, start in rank:
            x, w = 30 + unit * start, unit - 1
            p.box(x, y, w, 25, colours[what], hatched=what == "dW")
            p.words(x + w / 2, y + 17, str(micro_batch), "in small", "middle")
    p.words(16, 166, "rows: ranks; blue: forward, orange: dX, hatched: dW", "soft small")
    return p


PICTURES = (axes_bytes, limits, floors, zero_bubble)
