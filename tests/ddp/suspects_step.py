"""What a step's times come to where one rule of it is another, so that a message can name the rule.

A reading is told only where it gives the numbers of all cases that were asked, so that none is met by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab.judge import harmless, in_time


@harmless
def of_step(cases: Sequence[dict], got: Sequence[dict], name: str) -> str:
    """What explains this field of all cases; "" where nothing does."""
    for cause, rules in _readings():
        if all(_near(_step(c, **rules)[name], g[name]) for c, g in in_time(zip(cases, got, strict=True))):
            return f"; {name} of all {len(cases)} cases is what one gets if {cause}"
    return ""


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-7 * max(abs(a), abs(b)) + 1e-15


def _readings() -> Iterator[tuple[str, dict]]:
    yield (
        "each message has a network of its own: they follow each other, each when the last has come",
        {"arrival": "at once"},
    )
    yield (
        "the step is taken to be bound_s, which knows the first message and the last alone: those between may wait",
        {"arrival": "bound"},
    )
    yield "all of it may be hidden: a message cannot leave before its gradients are there", {"arrival": "hidden"}
    yield "parameters come in the order of forward: backward begins with the last", {"backwards": False}
    yield (
        "a message leaves when backward comes to its first parameter: it leaves when that is through with all of them",
        {"ready": False},
    )
    yield "messages leave during backward: they do so when it has ended", {"during": True}
    yield "messages leave when backward has ended: they do so during it", {"during": False}
    yield "backward takes as long for each parameter: its time goes by bytes", {"by_bytes": False}
    yield (
        "a bucket is closed only when it has reached or passed bucket_bytes: it holds at most as much",
        {"limit": "passed"},
    )
    yield "a bucket that is exactly full is not allowed: it holds at most bucket_bytes", {"limit": "below"}
    yield "bucket_bytes is 25 MB by default: it is 25 MiB", {"default": 25 * 10**6}
    yield "optimizer_s is left out", {"optimizer": 0}
    yield "forward_s is left out", {"forward": 0}
    yield "forward_s and optimizer_s are left out", {"forward": 0, "optimizer": 0}


def _step(
    case: dict, *, arrival: str = "in turn", backwards: bool = True, ready: bool = True, during: bool | None = None,
    by_bytes: bool = True, limit: str = "at most", default: int = 25 << 20, forward: int = 1, optimizer: int = 1,
) -> dict:  # fmt: skip
    """A step of a case by rules of which one is another."""
    o = {"forward_s": 0.0, "optimizer_s": 0.0, "bucket_bytes": default, **case["options"]}
    variant, backward = o["variant"], o["backward_s"]
    sizes = case["sizes"][::-1] if backwards else case["sizes"]
    messages = _messages(sizes, variant, o["bucket_bytes"], limit)
    if during is None:
        during = variant in ("overlapped", "bucketed")
    issued, reached = [], 0.0
    for message in messages:
        start = reached
        reached += sum(message) / sum(sizes) if by_bytes else len(message) / len(sizes)
        issued.append((reached if ready else start) * backward if during else backward)
    world = case["world"]
    costs = [2 * (world - 1) * (case["alpha_s"] + sum(m) / world / case["bytes_per_s"]) for m in messages]
    in_turn = 0.0
    for start, cost in zip(issued, costs, strict=True):
        in_turn = max(in_turn, start) + cost
    ended = {
        "in turn": in_turn,
        "at once": max(start + cost for start, cost in zip(issued, costs, strict=True)),
        "bound": max(issued[0] + sum(costs), issued[-1] + costs[-1]),
        "hidden": sum(costs),
    }[arrival]
    around = forward * o["forward_s"] + optimizer * o["optimizer_s"]
    bound = max(backward, issued[0] + sum(costs), issued[-1] + costs[-1])
    return {
        "all_reduces": len(messages), "communication_s": sum(costs), "exposed_s": max(0.0, ended - backward),
        "step_s": around + max(backward, ended), "bound_s": around + bound,
    }  # fmt: skip


def _messages(sizes: list[int], variant: str, bucket_bytes: int, limit: str) -> list[list[int]]:
    if variant != "bucketed":
        return [sizes] if variant == "flat" else [[size] for size in sizes]
    buckets: list[list[int]] = [[]]
    for size in sizes:
        held = sum(buckets[-1])
        room = {"at most": held + size <= bucket_bytes, "below": held + size < bucket_bytes,
                "passed": held < bucket_bytes}[limit]  # fmt: skip
        if buckets[-1] and not room:
            buckets.append([])
        buckets[-1].append(size)
    return buckets
