"""The messages that a sharded model must send in a step, and likely causes if it sends others."""

from collections import Counter

from lab.harness.judge import measured

from .probes_fsdp import Net

CHECKPOINTED = (
    "a block under checkpoint runs its forward again in backward, and backward uses the weights next: do not free them "
    "in between"
)


def parts(plan, world, small=0, blocks=False) -> tuple[list, int, int]:
    """Return ([(layer, n), …] in forward order, elements that are not sharded, all elements). n: elements of a shard.

    small: layers with fewer elements are not sharded. blocks: only blocks are layers.
    """
    m = Net(plan)
    layers = [("embedding", m.embedding), *enumerate(m.blocks), ("norm", m.norm), ("head", m.head)]
    sizes = [(name, sum(p.numel() for p in layer.parameters())) for name, layer in layers]
    sizes = [(name, size) for name, size in sizes if size >= small and (not blocks or isinstance(name, int))]
    total = sum(p.numel() for p in m.parameters())
    return [(name, -(-size // world)) for name, size in sizes], total - sum(size for _, size in sizes), total


def messages(plan, world, small=0, blocks=False, backward_dtype="float32", dtype="float32") -> Counter:
    """Count the messages that a rank must send in a step, by (op, phase, elements, dtype)."""
    sharded, unsharded, _ = parts(plan, world, small, blocks)
    want = Counter({("all_reduce", "finish", 1, "float32"): unsharded})
    for _, n in sharded:
        want["all_gather", "forward", n, dtype] += 1
        want["all_gather", "backward", n, dtype] += 1
        want["reduce_scatter", "backward", n, backward_dtype] += 1
    return want


def sends(rows) -> Counter:
    """Count the messages sent. An all-reduce counts once per element, because small parameters may share one."""
    found: Counter = Counter()
    for r in rows:
        size, times = (1, r["elements"]) if r["op"] == "all_reduce" else (r["elements"], 1)
        found[r["op"], r["phase"], size, r["dtype"]] += times
    return found


def listing(counter, names=None) -> str:
    """Describe the counted messages. names[n]: the layer whose shards have n elements."""
    names = names or {}
    return ", ".join(
        f"all_reduce of {times} elements in all {' '.join(map(str, (phase, *dtype)))}"
        if (op, n) == ("all_reduce", 1)
        else f"{times} x {op}{f' of {names[n]}' if n in names else ''} {' '.join(map(str, (phase, n, *dtype)))}"
        for (op, phase, n, *dtype), times in sorted(counter.items(), key=str)
    )


def check_messages(ranks, want, cause, plan, world, small=0):
    """Assert that each rank sends exactly these messages in every step."""
    names: dict[int, str] = {}
    for name, n in parts(plan, world, small)[0]:
        name = f"block {name}" if isinstance(name, int) else name
        names[n] = f"{names[n]} or {name}" if n in names else name
    for rank, got in enumerate(ranks):
        for step, record in enumerate(got["seen"]):
            found = sends(record["rows"])
            measured("messages of a rank in a step", found.total(), want.total())
            extra, lost = found - want, want - found
            rerun = {op == "all_gather" and "block" in names.get(n, "") for op, _, n, _ in extra} == {True} and not lost
            assert found == want, (
                f"rank {rank}, step {step}: {listing(extra, names) or 'nothing'} too much, "
                f"{listing(lost, names) or 'nothing'} missing (elements a rank): "
                f"{CHECKPOINTED if rerun and plan.get('checkpoint') else cause}"
            )
