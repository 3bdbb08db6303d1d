"""Inputs, float64 oracles and shared checks for sharded models."""

from dataclasses import replace
from operator import call

import torch

from lab.harness import gated, judge
from lab.harness.judge import close
from lab.ranks import gates

from . import probes_fsdp
from .probes_fsdp import DTYPES, Net


def draw_plan(rng, blocks=3, **flags) -> dict:
    """Draw the sizes of a net. All blocks differ in size; the number of ranks need not divide a size."""
    hidden = rng.shuffled(range(9, 9 + 2 * blocks, 2))
    return {"width": rng.integers(5, 7), "hidden": hidden, "vocabulary": rng.integers(11, 17), **flags}


def draw_batches(rng, plan, world, orders) -> list:
    """Return batches[rank][step][micro-batch] = [tokens, targets, order]. orders[step][micro-batch]: blocks to run."""
    rows = rng.integers(2, 3)
    return [
        [[[rng.tokens(rows, vocabulary=plan["vocabulary"]), rng.normal(rows, plan["vocabulary"]), o] for o in step]
         for step in orders] for _ in range(world)
    ]  # fmt: skip


def natural(plan, steps=3, micro=1) -> list:
    return [[list(range(len(plan["hidden"])))] * micro for _ in range(steps)]


def draw_numbers(rng, orders) -> dict[str, list[float]]:
    """Draw a number per gate of these steps; each is exact in all dtypes."""
    names = [
        f"{step}.{i} {name}" for step, micros in enumerate(orders) for i, order in enumerate(micros) for name in (
            "embedded", "blocks", *(f"block {b} {what}" for b in {*order} for what in ("begins", "backward", "ends"))
        )
    ]  # fmt: skip
    return {name: [rng.integers(48, 80) / 64] for name in names}


def whole_batch(plan, state, batches, optim, dtype, numbers) -> dict:
    """Train in one process on the batches of all ranks. dtype: of all tensors. With a 16-bit dtype, weights are
    float32, and cast for the computation; "" leaves dtypes as they are. numbers: by which gates multiply; {}: no gates.
    """
    m = Net({**plan, "checkpoint": False})
    m.load_state_dict(state)
    mixed = dtype in ("bfloat16", "float16")
    if dtype:
        m.to(torch.float32 if mixed else DTYPES[dtype])
    trained = [p for p in m.parameters() if p.requires_grad]
    optimizer = probes_fsdp.optimizer(optim[0], trained, optim[1])
    losses: list[list[float]] = [[] for _ in batches]
    evaluated = []
    compute_dtype = DTYPES[dtype] if mixed else None
    with gates.answered(numbers):
        for step in range(len(batches[0])):
            optimizer.zero_grad()
            for i in range(len(batches[0][step])):
                m.begin(f"{step}.{i}" if numbers else "")
                for rank, rank_losses in zip(batches, losses, strict=True):
                    tokens, targets, order = rank[step][i]
                    value = probes_fsdp.loss(_forward(m, tokens, order, compute_dtype), targets)
                    rank_losses.append(float(value.detach()))
                    (value / len(rank[step]) / len(batches)).backward()
            optimizer.step()
            m.begin("")
            with torch.no_grad():
                outs = [_forward(m, rank[step][0][0], rank[step][0][2], compute_dtype) for rank in batches]
                evaluated.append([out.double() for out in outs])
    return {"losses": losses, "state": dict(m.state_dict()), "evaluated": evaluated}


def _forward(m, tokens, order, dtype):
    if dtype is None:
        return m(tokens, order)
    cast = {n: p.to(dtype) for n, p in m.named_parameters()}
    return torch.func.functional_call(m, cast, (tokens, order), tie_weights=True)


def check_training(
    run, rng, kind, plan, orders, world, optim="sgd", options=None, reduced="", hold=(), expect=call
) -> list[dict]:
    """Assert that ranks train like one process on the whole batch: start, losses, outputs, weights, sent gradients.

    Returns the values of each rank, with "seen": its `step_records`. reduced: the 16-bit dtype of the computation.
    hold: pairs of gates between which the switch withholds answers.
    """
    states = [gated.draw_state(rng, Net(plan), 0.4) for _ in range(world)]  # they differ between ranks
    batches = draw_batches(rng, plan, world, orders)
    numbers = draw_numbers(rng, orders)
    optim_args = [optim, rng.uniform(0.05, 0.1) if optim == "sgd" else rng.uniform(0.01, 0.02)]
    traces = run.trace(
        probes_fsdp.train, kind, options or {}, plan, states, batches, optim_args, world=world, gates=numbers,
        hold=hold,
    )  # fmt: skip
    ranks = [{**trace.values, "seen": step_records(trace, orders)} for trace in traces]
    want = expect(whole_batch, plan, states[0], batches, optim_args, "float64", numbers)
    plain = expect(whole_batch, plan, states[0], batches, optim_args, reduced, numbers)
    factor = 6 if reduced else 15
    expected = "expected what one process gets: the mean over ranks of the sum over backwards"

    for rank, got in enumerate(ranks):
        label = f"rank {rank} of {world}{', in evaluation mode' if world % 2 else ''}"
        judge.modes(got["modes"], label)
        for i, (forward, backward) in enumerate(got["held"]):
            assert not forward, (
                f"{label}, backward {i}: {len(forward)} units are whole, or attributes of their modules, after "
                "forward: free and hide them by then"
            )
            limit = 2 if kind == "prefetch" else 0  # one layer may have been fetched but not used
            assert len(backward) <= limit, (
                f"{label}, backward {i}: {len(backward)} units are whole, or attributes of their modules, after it, "
                f"expected {limit} at most; {backward.count('frozen')} of them are frozen: what is frozen gets no "
                "gradient that says it is done, its layer's input does"
            )
        assert kind == "prefetch" or got["most"] <= 2, (  # prefetch may fetch an unused layer when the order changes
            f"{label}: {got['most']} layers are whole while a block computes, expected 2 at most: free each when done"
        )
        assert not any(got["unfreed"]), (
            f"{label}: {got['unfreed']} units, per step, are whole after finish_gradient_synchronization()"
        )
        for moment in ("start", "state"):
            assert sorted(got[moment]) == sorted(want["state"]), (
                f"{label}: full_state() has {sorted(got[moment])}, expected {sorted(want['state'])}"
            )
        for name, tensor in states[0].items():
            assert got["start"][name].dtype == tensor.dtype, (
                f"{label}: {name} starts as {got['start'][name].dtype}, expected {tensor.dtype}, as the module has it: "
                "what is kept is not cast, only what is sent and computed with"
            )
            unchanged = torch.equal(got["start"][name], states[rank][name])
            tensor_kind = "buffer" if name in dict(probes_fsdp.Net(plan).named_buffers()) else "parameter"
            assert torch.equal(got["start"][name], tensor), (
                f"{label}: {name}, a {tensor_kind}, starts different from rank "
                f"0's{', as it was on this rank' if unchanged else ''}: cut and keep what the group's rank 0 has, "
                "buffers too"
            )
    for rank, got in enumerate(ranks):
        label = f"rank {rank} of {world}"
        close(
            torch.tensor(got["losses"]), torch.tensor(want["losses"][rank], dtype=torch.float64),
            torch.tensor(plain["losses"][rank]), f"{label}, losses", factor=factor, dims="micro-batch",
            cause="weights that are not those of one process on the whole batch, or are not up to date; where several "
            "backwards come before a step, their gradients add up",
        )  # fmt: skip
        for step, out in enumerate(got["evaluated"]):
            close(
                out, want["evaluated"][step][rank], plain["evaluated"][step][rank].float(),
                f"{label}, output under no_grad after step {step}", factor=factor,
                cause=expected if kind == "zero2"
                else "after the optimizer's step a gathered layer is old: it has to be gathered again",
            )  # fmt: skip
        for name, tensor in got["state"].items():
            assert tensor.dtype == states[0][name].dtype, (
                f"{label}: {name} is {tensor.dtype}, expected {states[0][name].dtype}"
            )
            assert torch.equal(tensor, ranks[0]["state"][name]), (
                f"{name} differs between ranks 0 and {rank} after {len(orders)} steps"
            )
        # A few 16-bit values may all be exact by luck, so 16-bit errors are measured over all weights.
        for names in [[*want["state"]]] if reduced else [[n] for n in want["state"]]:
            weights = [torch.cat([x["state"][n].flatten() for n in names]) for x in (got, want, plain)]
            close(
                weights[0], weights[1].double(), weights[2].float(),
                f"{label}, {', '.join(names)} after {len(orders)} steps", factor=factor,
                cause=expected,
            )  # fmt: skip
    if not reduced and len(orders[0]) == 1 and not any(plan.get(flag) for flag in ("tied", "frozen", "double")):
        for rank, got in enumerate(ranks):
            local = _local_gradients(plan, states[0], batches[rank][0][0], numbers, kind == "zero2")
            _check_scatters(f"rank {rank} of {world}", got["seen"][0], local, world)
    return ranks


def _local_gradients(plan, state, batch, numbers, by_parameter) -> list[torch.Tensor]:
    """Return the float64 gradients of one rank's first micro-batch, flat, per parameter or per layer."""
    m = Net({**plan, "checkpoint": False})
    m.load_state_dict(state)
    m.double().begin("0.0")
    with gates.answered(numbers):
        probes_fsdp.loss(m(batch[0], batch[2]), batch[1]).backward()
    layers = [[p] for p in m.parameters()] if by_parameter else [
        [*layer.parameters()] for layer in (m.embedding, *m.blocks, m.norm, m.head)
    ]  # fmt: skip
    by_layer = [[p.grad for p in layer if p.grad is not None] for layer in layers]
    return [torch.cat([g.flatten() for g in gradients]) for gradients in by_layer if gradients]


def _check_scatters(label, step, gradients, world) -> None:
    """Assert that each reduce-scatter holds a gradient of this rank: in any order, maybe padded, maybe divided by W."""
    for row, payload in zip(step["rows"], step["payloads"], strict=True):
        if row["op"] != "reduce_scatter" or payload is None:
            continue
        sent = payload.double().sort().values
        candidates = []
        for gradient in gradients:
            if -(-gradient.numel() // world) * world == sent.numel():
                padded = torch.cat([gradient, gradient.new_zeros(sent.numel() - gradient.numel())]).sort().values
                candidates += [padded / world, padded]
        assert any((sent - one).abs().max() <= 1e-4 * one.abs().max() for one in candidates), (
            f"{label}: a reduce-scatter of {sent.numel()} elements in {row['phase']} holds no gradient of this rank"
        )


PHASES = {"forward", "backward", "finish", "step", "no_grad", "over"}


def step_records(trace, orders) -> list[dict]:
    """Return per step: "rows", its messages in order, each with its phase; "no_grad", the messages after the step;
    "payloads" of the rows; "asked"[gate], the messages of the step that had left at the first request of the gate;
    "stalls", the numbers of the messages for which the rank waited while the switch withheld answers."""
    marks = [gate for gate in trace.gates if gate.name.split(" ", 1)[-1] in PHASES]
    phases = [
        [f"{step}.{i} {name}" for i in range(len(micros)) for name in ("forward", "backward")]
        + [f"{step} {name}" for name in ("finish", "step", "no_grad", "over")]
        for step, micros in enumerate(orders)
    ]
    names = [name for step in phases for name in step]
    sections = dict(zip(names, replace(trace, gates=marks).cut(names), strict=True))
    issued, records = {gate.name: gate.issued for gate in reversed(trace.gates)}, []
    for step, (*work, no_grad, _) in enumerate(phases):
        step_gates = [name for name in issued if name.startswith((f"{step}.", f"{step} "))]
        rows = [{**row, "phase": name.split()[-1]} for name in work for row in sections[name]]
        records.append({
            "rows": rows, "no_grad": [{**row, "phase": "no_grad"} for row in sections[no_grad]],
            "payloads": [trace.payloads[row["number"]] for row in rows],
            "asked": {name: issued[name] - issued[work[0]] for name in step_gates},
            "stalls": {row.number for row in trace.stalls},
        })  # fmt: skip
    return records


OVERFLOWS = "divide before the sum: the mean fits in float16, the sum does not"


def check_group_mean(run, rng, kind, options=None):
    """Assert that a model with a group averages gradients over that group."""
    order = rng.shuffled(range(5))
    groups = [sorted(order[:2]), sorted(order[2:])]
    values = [rng.normal(rng.integers(7, 7), 3) for _ in range(5)]
    ranks = run(probes_fsdp.gradients, kind, options or {}, values, groups, world=5)
    for group in groups:
        check_mean(ranks, group, [values[r] for r in group], 10, f"group {group}: use the group that you were given")
        for rank in group:
            for what, starts in ((n, s) for n, s in ranks[rank].items() if n.endswith("start")):
                assert {*starts.values()} == {group[0]}, (
                    f"rank {rank} of group {group}, layer {what.split()[0]}: parameters and buffers are those of ranks "
                    f"{starts}, expected all of rank {group[0]}, the first of the group"
                )


def check_fp16_mean(run, rng, kind, options=None, cause=OVERFLOWS):
    """Assert that the mean of fp16 gradients is right where their sum would overflow."""
    world = rng.integers(3, 4)
    values = [rng.normal(5, 3).clamp(-1, 1).half() * 30000 + 25000 for _ in range(world)]
    ranks = run(probes_fsdp.gradients, kind, options or {}, values, [], world=world)
    check_mean(ranks, range(world), values, 6, cause, True)


def check_mean(ranks, group, values, factor, cause, half=False):
    """Assert that these ranks' shards together form the mean, and that each unsharded gradient equals the mean."""
    want = torch.stack(values).double().mean(0).flatten()
    plain = want.half() if half else torch.stack(values).mean(0).flatten()
    gradients = {f"whole, rank {r}": ranks[r]["whole"] for r in group if "whole" in ranks[r]}
    if all("cut" in ranks[r] for r in group):
        gradients["shards"] = torch.cat([ranks[r]["cut"].flatten() for r in group])[: want.numel()]
    for what, got in gradients.items():
        close(got.flatten(), want, plain, f"gradient, {what}", factor=factor, cause=cause)


def held_and_baseline(run, kind, options, plan, tokens, world) -> list:
    """Return (bytes held by this kind, bytes held by plain FSDP) per rank; tests judge the difference."""
    args = plan, tokens
    held = run(probes_fsdp.held_bytes, kind, options, *args, world=world)
    return [*zip(held, run(probes_fsdp.held_bytes, "gather", {}, *args, world=world), strict=True)]


def big_plan(blocks) -> dict:
    """Return the sizes of a net whose equal layers are much larger than their activations."""
    return {"width": 32, "hidden": [64] * blocks, "vocabulary": 128}


BLOCK = 4 * (2 * 32 * 64 + 64 + 32)  # bytes of one block of big_plan; its embedding and head are nearly as large
