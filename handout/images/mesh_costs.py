"""The pictures of the chapter on meshes that show what a step costs; numbers are those of the exercise accounting."""

from __future__ import annotations

from lab.model.transformer import MODELS
from reference.mesh.accounting import Cost, Degrees, Device, Workload, accounting, layer_times

from .picture import BLUE, GREEN, GREY, ORANGE, WIDTH, Chart, Picture


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


PICTURES = (axes_bytes, limits, floors)
