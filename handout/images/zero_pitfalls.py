"""Pictures of two pitfalls of the chapter on ZeRO. Their numbers are computed."""

from .picture import BLUE, ORANGE, Chart, Picture, picture, spaced
from .zero import memory_over_step

LAYERS = 6  # as in memory_over_step()


@picture(352, "Parameters and gradients held in a step of six layers, where layers are freed and where they are not")
def unfreed(p: Picture) -> None:
    """Parameters and gradients of memory_over_step(), and above them memory that a layer frees only in backward."""
    unit, width, moments = 7.0, 27.0, [sum(parts[:2]) for parts in memory_over_step("zero3")]
    p.words(16, 22, "held, in layers; orange: what should be free", "soft")
    for top, (name, extra) in spaced(
        (("layers are freed", None), ("storage not emptied", 0), ("weight * scale", 1)), 46, 98
    ):
        left_over = [0.0] * len(moments)
        if extra is not None:  # from forward to backward; each layer adds `extra`
            left_over[1:-1] = [done + extra for done in (*range(LAYERS), *reversed(range(LAYERS)))]
        highest = max(n + leftover for n, leftover in zip(moments, left_over, strict=True))
        p.words(16, top, f"{name}: at most {highest:g} layers", "ink bold")
        for x, (n, leftover) in spaced(zip(moments, left_over, strict=True), 24, width):
            bottom = top + 82
            p.box(x, bottom - unit * n, width - 3, unit * n, BLUE)
            if leftover:
                p.box(x, bottom - unit * (n + leftover), width - 3, unit * leftover - 1, ORANGE, hatched=True)
    for x, name in ((24 + 4 * width, "forward"), (24 + 10 * width, "backward")):
        p.words(x, 344, name, "soft", "middle")


@picture(270, "The output of y = w x over eight steps, with a layer that is freed before the step and one that is not")
def lagging(p: Picture) -> None:
    """SGD with a rate of 0.5 on y²/2, from w = 8, x = 1. Forward of a layer that was not freed reads old weights."""
    c = Chart(p, (1, 8), (-4, 8.5), log_x=False, log_y=False)
    c.axes("step", "output y", range(1, 9), {-4: "−4", 0: "0", 4: "4", 8: "8"})
    for frees, colour, name in ((True, BLUE, "freed"), (False, ORANGE, "still gathered in the next forward")):
        shard, full, seen = 8.0, None, list[float]()
        for _ in range(8):
            full = shard if full is None else full
            seen.append(full)  # this is y, and also dy, so the gradient of w is y
            full, shard = None if frees else shard, shard - 0.5 * seen[-1]
        c.curve([*enumerate(seen, 1)], colour, dashed=not frees)
        for step, y in enumerate(seen, 1):
            c.dot(step, y, colour)
        c.label(2, seen[1], name, "end" if frees else "start", dx=-12 if frees else 12, dy=5)
