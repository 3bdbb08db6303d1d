"""Draws inputs for sharded optimizers, and checks that they step exactly like the unsharded optimizer."""

import heapq
import itertools

import torch

from lab.harness.judge import measured, never_holds
from lab.harness.trace import Trace

from . import probes_optimizer as probes

# With these options, each optimizer keeps as much state as it can.
OPTIONS = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True},
    "Adam": {"lr": 0.03, "betas": [0.8, 0.95]},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "NAdam": {"lr": 0.02},
    "Adamax": {"lr": 0.02},
    "Adafactor": {"lr": 0.05},
}


def draw_shapes(rng, count) -> list:
    """Draw shapes of matrices, vectors and scalars; the last is a matrix."""
    return [
        rng.choice([(), (rng.integers(1, 9),), (rng.integers(1, 6), rng.integers(2, 6))]) for _ in range(count - 1)
    ] + [(rng.integers(6, 9), rng.integers(6, 9))]


def draw_gradients(rng, values, without=()) -> list:
    return [None if i in without else rng.normal(*v.shape).to(v.dtype) for i, v in enumerate(values)]


def draw_plan(rng, name="AdamW", count=None, steps=4, frozen=(), dtypes=(torch.float32,), large=(), **extra) -> dict:
    """Draw a plan for `probes.train`. Frozen tensors get no gradient. large: shapes of additional tensors."""
    count = count or rng.integers(5, 9)
    shapes = rng.shuffled([*draw_shapes(rng, count), *large])
    values = [rng.normal(*s).to(dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]
    return {
        "optimizer": name,
        "options": OPTIONS.get(name, {"lr": 0.3}),
        "values": values,
        "groups": ["all"],
        "frozen": list(frozen),
        "steps": [{"gradients": draw_gradients(rng, values, frozen)} for _ in range(steps)],
        **extra,
    }


def plan_of(rng, values, frozen=(), name="AdamW") -> dict:
    """Draw a plan with one step on these tensors. frozen: indices of the frozen ones."""
    plan = {**draw_plan(rng, name, count=3), "values": values, "frozen": [*frozen]}
    return {**plan, "steps": [{"gradients": draw_gradients(rng, values, frozen)}]}


def draw_even(rng, count) -> dict:
    """Draw a plan with predictable bytes: tensors of nearly equal size, and two much larger frozen ones."""
    sizes = [rng.integers(60, 80) for _ in range(count)]
    frozen = sorted(rng.shuffled(range(count))[:2])
    values = [rng.normal(10 * size if i in frozen else size) for i, size in enumerate(sizes)]
    steps = [{"gradients": draw_gradients(rng, values, frozen)} for _ in range(2)]
    return {**draw_plan(rng, count=2), "values": values, "frozen": frozen, "steps": steps}


def draw_groups(rng, plan, count=3) -> list:
    """Draw groups with different hyperparameters. The first group uses the defaults."""
    order = rng.shuffled(range(len(plan["values"])))
    cuts = [0, *sorted(rng.shuffled(range(1, len(order)))[: count - 1]), len(order)]
    groups = [{"params": order[a:b]} for a, b in itertools.pairwise(cuts)]
    for group in groups[1:]:
        group.update(lr=rng.uniform(0.01, 0.3), weight_decay=rng.uniform(0, 0.5), eps=rng.uniform(1e-8, 1e-2))
    return groups


def check_as_unsharded(run, plan, kind, world, hold=()) -> list[list[dict]]:
    """Assert that after each step each rank's tensors equal those of the plain optimizer, bit for bit.

    Returns the `step_records` of each rank, or [] if only some take part. hold: steps in which the switch withholds
    answers.
    """
    want = run(probes.train, "plain", {**plan, "only": []})
    intervals = [(f"step {step}", f"step {step} is done") for step in hold]
    traces = run.trace(probes.train, kind, plan, world=world, hold=intervals)
    for rank in plan.get("only") or range(world):
        check_same_steps(f"rank {rank} of {world}, {plan['optimizer']}", traces[rank].values, want, plan)
    return [] if plan.get("only") else [step_records(trace, len(plan["steps"])) for trace in traces]


def step_records(trace: Trace, steps: int) -> list[dict]:
    """Return per step: "rows", the messages from its begin to the next step; "stalls", how often the rank waited for
    one of them while the switch withheld answers."""
    parts = trace.cut([name for step in range(steps) for name in (f"step {step}", f"step {step} is done")])
    waited = [row.number for row in trace.stalls]
    rows = [within + after for within, after in zip(parts[::2], parts[1::2], strict=True)]
    return [{"rows": part, "stalls": sum(waited.count(row["number"]) for row in part)} for part in rows]


def check_growth(run, rng, kind) -> None:
    """Assert, by the memory peak, that a rank keeps only its share of AdamW's state: no old gradients, no copies."""
    world, sizes, seed = 4, [rng.integers(740_000, 780_000) for _ in range(12)], rng.integers(0, 10**6)
    want = run(probes.large, "plain", sizes, seed, 2)
    traces = run.trace(probes.large, kind, sizes, seed, 2, world=world)
    baselines = run.trace(probes.large, kind, [8] * 12, seed, 2, world=world)
    copy_bytes = 4 * sum(sizes)
    for rank, (trace, small) in enumerate(zip(traces, baselines, strict=True)):
        for i, tensor in enumerate(want["digests"]):
            assert torch.equal(trace.values["digests"][i], tensor), (
                f"rank {rank} of {world}: tensor {i} of {sizes[i]:,} elements is not the unsharded optimizer's after 2 "
                "steps of AdamW"
            )
        needs_bytes = int((1 + probes.BALLAST) * copy_bytes) + 3 * copy_bytes // world
        what = "after zero_grad(), what others own of the state, or another copy of parameters or gradients,"
        if alive := trace.values["alive"]:
            what = f"after zero_grad(), gradients ({alive} of {len(sizes)} are alive: is a piece's .grad still a view?)"
        never_holds(trace, small, what, copy_bytes, needs_bytes)


def check_resuming(run, rng, kind, world) -> None:
    """Assert that a new optimizer of this kind, on equally many ranks, continues from the first one's state_dict()."""
    plan = draw_plan(rng, rng.choice(["AdamW", "SGD"]), count=7)
    plan["groups"] = draw_groups(rng, plan)
    want = run(probes.train, "plain", plan)
    for rank, got in enumerate(run(probes.resumed, kind, kind, plan, 2, world=world)):
        check_loaded(f"rank {rank}: after state_dict() and load_state_dict()", got["values"], want)
        assert got["rates"] == want["rates"], (
            f"rank {rank}: learning rates after load_state_dict {got['rates']}, expected {want['rates']}"
        )


def check_loaded(what, got, want) -> None:
    """Assert that tensors equal those of an uninterrupted training."""
    for i, tensor in enumerate(want["values"][-1]):
        assert torch.equal(got[i], tensor), (
            f"{what} tensor {i} goes another way: moments, counts and hyperparameters all come from the state_dict"
        )


def check_same_steps(what, got, want, plan) -> None:
    """Assert equal tensors after each step, and equal rates, groups, return values and cleared gradients."""
    assert got["calls"] == want["calls"], (
        f"{what}: in {len(want['values'])} steps the closure was called {got['calls']} times, expected {want['calls']}"
    )
    assert got["grad_enabled"], f"{what}: the closure was called with gradients disabled: loss.backward() would raise"
    for step, tensors in enumerate(want["values"]):
        local = got["values"][step]
        for i, tensor in enumerate(tensors):
            assert local[i].shape == tensor.shape, (
                f"{what}: tensor {i} became {tuple(local[i].shape)}, was {tuple(tensor.shape)}"
            )
        if wrong := [i for i, tensor in enumerate(tensors) if not torch.equal(local[i], tensor)]:
            tensor, values = tensors[wrong[0]].flatten(), local[wrong[0]].flatten()
            worst = int((values - tensor).abs().nan_to_num(torch.inf).argmax())
            raise AssertionError(
                f"{what}: {_listed(wrong, plan)} of {len(tensors)} differ{'s' * (len(wrong) == 1)} after step {step}; "
                f"worst in tensor {wrong[0]} of shape {tuple(tensors[wrong[0]].shape)} at flat index {worst}: got "
                f"{float(values[worst]):.9g}, the unsharded optimizer has {float(tensor[worst]):.9g}: each tensor is "
                "updated by its owner, by its own group's hyperparameters of this moment, and sent to all the others"
            )
        assert got["returned"][step] == want["returned"][step], (
            f"{what}: step {step} returned {got['returned'][step]}, expected {want['returned'][step]}: what the "
            "closure returned, None without one"
        )
        assert got["kept"][step] == want["kept"][step], (
            f"{what}: largest gradients after zero_grad in step {step} (-1: None) are {got['kept'][step]}, expected "
            f"{want['kept'][step]}: it clears the gradient of every tensor, whoever owns it"
        )
    assert got["rates"] == want["rates"], f"{what}: learning rates at the end {got['rates']}, expected {want['rates']}"
    assert got["listed"] == want["listed"], (
        f"{what}: tensors by group {got['listed']}, expected {want['listed']}: param_groups has those of all ranks"
    )


def _listed(wrong, plan) -> str:
    """List these tensors by number, with the properties that all of them share."""
    kinds = {"frozen at first": plan.get("frozen", []), "transposed": plan.get("transposed", [])}
    shared = [name for name, members in kinds.items() if {*wrong} <= {*members}]
    names = f"tensor{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
    return names + f" ({' and '.join(shared)})" * bool(shared)


def sent_bytes(rows, rank, world) -> float:
    """Return the bytes that the rank sent, counted as in handout/conventions.md: only the root sends a broadcast."""
    total = 0.0
    for row in rows:
        share = {
            "broadcast": (world - 1) * row["bytes"] if row["peer"] == rank else 0,
            "all_gather": (world - 1) * row["bytes"],
            "all_reduce": 2 * (world - 1) / world * row["bytes"],
            "reduce_scatter": (world - 1) * row["bytes"],  # a row counts the bytes of one part
            "recv": 0,
            "barrier": 0,
        }
        total += share.get(row["op"], row["bytes"])
    return total


def owned_bytes(run, plan, kind, world) -> list[float]:
    """Return, per rank, the bytes of its tensors: in the plan's one step it sends them to each other rank."""
    (steps,) = zip(*check_as_unsharded(run, plan, kind, world), strict=True)
    return [sent_bytes(step["rows"], rank, world) / (world - 1) for rank, step in enumerate(steps)]


def check_bytes_sent(run, plan, kind, world, padding) -> None:
    """Assert that in each step all ranks send only their own tensors. padding: bytes that may be added."""
    size = sum(v.nbytes for i, v in enumerate(plan["values"]) if i not in plan["frozen"])
    for step, ranks in enumerate(zip(*check_as_unsharded(run, plan, kind, world), strict=True)):
        sent = sum(sent_bytes(got["rows"], rank, world) for rank, got in enumerate(ranks))
        measured(f"bytes that {world} ranks send in a step", sent, (world - 1) * (size + padding), "bytes", True)
        ops = sorted({r["op"] for got in ranks for r in got["rows"]})
        assert sent <= (world - 1) * (size + padding), (
            f"step {step}: {world} ranks sent {sent:,.0f} bytes ({', '.join(ops)}); parameters of {size:,} bytes, each "
            f"sent by its owner to {world - 1} others, take {(world - 1) * size:,}: gradients and frozen tensors are "
            "equal already, and an all-reduce sends everything twice"
        )


def shares(amounts, world) -> list[int]:
    """Give each amount in turn to the rank with the smallest sum; return the sums, sorted."""
    sums = [0] * world  # a heap: the smallest sum is first
    for amount in amounts:
        heapq.heapreplace(sums, sums[0] + amount)
    return sorted(sums)
