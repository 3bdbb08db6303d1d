"""A plan's training step: events and memory of each stage, a lower bound of its time, and its simulated time."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from .events import Block, Collective, Compute, Event, Program, Recv, Send, Wait
from .jobs import Job, Plan, spread, unfit
from .parts import DATA, Part, Unit, blocks_of, data_group, each_unit, gather, held_by, part_of, reduction, unit_sizes
from .prices import collective_s, compute_s
from .simulator import SimulationResult, closed, play

TIED = "tied embedding"
NORM = "gradient norm"
GATHERED, REDUCED, FIRST = 1, 2, 10  # handles: gather of the next unit; reduction; first gather with ZeRO 1 and 2
RESERVED = 0.05  # assumed share of device memory for the CUDA context, NCCL's buffers and fragmentation


def price(job: Job, plan: Plan, timeline: bool = False) -> SimulationResult:
    """Simulate a step on the first rank of each stage (`programs`). Slow: time grows with the micro-batches."""
    return play(programs(job, plan), job.cluster, timeline)


def floor_s(job: Job, plan: Plan) -> float:
    """Return a lower bound of a step's seconds, at most those of `price`. Computing it takes microseconds.

    The bound of a stage is the time before its first action and after its last, plus its own work, plus the
    optimizer's step. Return the largest bound of any stage.
    """
    return max(_bounds(job, plan))


def memory(job: Job, plan: Plan) -> dict[str, float]:
    """Bytes by kind on the fullest stage: parameters, gradients, optimizer, activations, buffers, and "total".

    Activations: those that the schedule keeps at once, with bytes per token and layer from Korthikanti et al. 2022,
    section 4. Full recomputation keeps the input of each layer, and all activations of one layer. Buffers: logits; with
    ZeRO 2 also the unsharded gradients of two neighbouring units (layers, embedding or head), because one unit computes
    while the other is being sent; with ZeRO 3 also their unsharded parameters.
    """
    return max((_stage_memory(job, plan, stage) for stage in _distinct_stages(plan)), key=lambda kinds: kinds["total"])


def fits(job: Job, plan: Plan) -> bool:
    """Whether `memory` fits into the device's memory after subtracting the RESERVED share."""
    return memory(job, plan)["total"] <= (1 - RESERVED) * job.cluster.device.hbm_bytes


def model_flops(job: Job, recompute: bool = False) -> float:
    """Return the FLOPs of a step of the whole model, counted as in Narayanan et al. 2021, section 3.4.

    Scores count as if unmasked; norms do not count. A step is 3 times the forward, with `recompute` 4 times. For GPT:
    72 · B s l h² (1 + s/6h + V/12lh), and with `recompute` 96 · B s l h² (1 + s/6h + V/16lh).
    """
    m, tokens = job.model, job.sequences * job.context
    layer = 2 * m.layer_products + 4 * job.context * m.width
    return tokens * ((4 if recompute else 3) * m.layers * layer + 3 * 2 * m.width * m.vocabulary)


# Programs


def programs(job: Job, plan: Plan) -> dict[int, Program]:
    """Return the program of each stage's first rank, by global rank. Raises ValueError if the plan is `unfit`."""
    if why := unfit(job, plan):
        raise ValueError(f"expected a plan for this job, got {plan}: {why}")
    return {stage * plan.tensor: _program(job, plan, stage) for stage in range(plan.pipe)}


def _program(job: Job, plan: Plan, stage: int) -> Program:
    """Return a rank's events: gathers (ZeRO 1 and 2), micro-batches in schedule order, reductions, the step."""
    parts = [part_of(job, plan, chunk * plan.pipe + stage) for chunk in range(plan.chunks)]
    group, overlap = data_group(job, plan, stage), job.recipe.overlap_data and plan.data > 1
    events: list[Event] = []
    if plan.zero in (1, 2) and overlap:
        for number, unit in enumerate(unit for part in parts for unit in each_unit(part.units)):
            events.append(gather(job, plan, group, unit.parameters, FIRST + number))
    steps = _order(plan, stage, plan.micro_batches(job))
    remaining = [plan.micro_batches(job)] * plan.chunks  # backwards still to come
    if plan.zero == 3 and overlap:
        events.append(gather(job, plan, group, parts[steps[0][2]].units[0].parameters, GATHERED))
    for number, (backward, micro_batch, chunk) in enumerate(steps):
        part = parts[chunk]
        source, dest = (part.next_rank, part.previous_rank) if backward else (part.previous_rank, part.next_rank)
        name = "backward" if backward else "forward"
        stage_id = chunk * plan.pipe + stage
        if source is not None:
            events.append(Recv(source, part.message, (name, micro_batch, stage_id), name))
        remaining[chunk] -= backward
        reduced = backward and plan.data > 1 and (plan.zero >= 2 or (overlap and not remaining[chunk]))
        if plan.zero == 3 or reduced:
            upcoming = 0.0
            if number + 1 < len(steps):
                next_backward, _, next_chunk = steps[number + 1]
                upcoming = parts[next_chunk].units[-1 if next_backward else 0].parameters
            events += _by_units(job, plan, group, part, backward, upcoming)
        elif plan.zero and overlap and not backward and micro_batch == 0:
            first = FIRST + sum(unit.count for p in parts[:chunk] for unit in p.units)
            events += part.input_gather(False)
            for index, unit in enumerate(each_unit(part.units)):
                events += [Wait(first + index), unit.forward]
        else:
            events.append(part.backward if backward else part.forward)
        if dest is not None:
            dest_id = stage_id + (-1 if backward else 1)
            events.append(Send(dest, part.message, (name, micro_batch, dest_id), name, not job.recipe.overlap_messages))
    return (*events, *_end(job, plan, stage))


def _by_units(job: Job, plan: Plan, group: range, part: Part, backward: bool, upcoming: float) -> list[Event]:
    """Return a forward or backward, unit by unit. After each unit's backward, its gradients are reduced.

    With ZeRO 3, a unit is gathered while the previous unit computes. upcoming: parameters of the first unit of the next
    action; 0 if there is no next action.
    """
    units = part.units[::-1] if backward else part.units
    events = part.input_gather(backward)
    for index, unit in enumerate(units):
        after = units[index + 1].parameters if index + 1 < len(units) else upcoming

        def unit_events(following: float, unit: Unit = unit) -> list[Event]:
            gathers: list[Event] = [Wait(GATHERED)] if plan.zero == 3 else []
            if plan.zero == 3 and not job.recipe.overlap_data:
                gathers = [gather(job, plan, group, unit.parameters, None)]
            elif plan.zero == 3 and following:
                gathers.append(gather(job, plan, group, following, GATHERED))
            scatter = _reduction(job, plan, group, unit) if backward else []
            return [*gathers, unit.backward if backward else unit.forward, *scatter]

        events += [Block(tuple(unit_events(unit.parameters)), unit.count - 1), *unit_events(after)]
    return events


def _reduction(job: Job, plan: Plan, group: range, unit: Unit) -> list[Event]:
    """Return the reduction of a unit's gradients. ZeRO 2 and 3 keep whole gradients of two units, so wait first."""
    handle = REDUCED if job.recipe.overlap_data else None
    scatter = reduction(job, plan, group, unit.parameters, handle)
    return [Wait(REDUCED), scatter] if plan.zero >= 2 and handle else [scatter]


def _end(job: Job, plan: Plan, stage: int) -> list[Event]:
    """Events after the last backward."""
    m, recipe = job.model, job.recipe
    events: list[Event] = [Wait(REDUCED)]
    group = data_group(job, plan, stage)
    if m.tied and plan.pipe > 1 and stage in (0, plan.pipe - 1):
        payload = recipe.gradient * m.ends[0] / plan.tensor
        events.append(Collective("all_reduce", payload, (0, (plan.pipe - 1) * plan.tensor), "step", TIED))
    if plan.data > 1 and not recipe.overlap_data and plan.zero < 2:
        events += [reduction(job, plan, group, parameters, None) for parameters in held_by(job, plan, stage)]
    parameters = sum(held_by(job, plan, stage))
    sharded = plan.data if plan.zero else 1
    events.append(Collective("all_reduce", 4, range(job.cluster.gpus), "step", NORM))
    events.append(Compute(0, recipe.step_traffic * parameters / sharded, phase="step", label="AdamW"))
    if plan.zero in (1, 2) and not recipe.overlap_data:
        events += [gather(job, plan, group, parameters, None) for parameters in held_by(job, plan, stage)]
    return events


def _order(plan: Plan, stage: int, micro_batches: int) -> list[tuple[bool, int, int]]:
    """Return (is backward, micro-batch, chunk) per action: 1F1B, or interleaved 1F1B (Narayanan et al. 2021, 2.2)."""
    pipe, chunks, total = plan.pipe, plan.chunks, micro_batches * plan.chunks

    def action(backward: bool, k: int) -> tuple[bool, int, int]:
        if chunks == 1:
            return backward, k, 0
        group, k = divmod(k, pipe * chunks)
        chunk, index = divmod(k, pipe)
        return backward, group * pipe + index, chunks - 1 - chunk if backward else chunk

    warm_up = min(total, _warm_up(plan, stage))
    steps = [action(False, k) for k in range(warm_up)]
    for k in range(total - warm_up):
        steps += [action(False, k + warm_up), action(True, k)]
    return steps + [action(True, k) for k in range(total - warm_up, total)]


def _warm_up(plan: Plan, stage: int) -> int:
    """Return the number of forwards before the first backward, if there are enough micro-batches."""
    return (plan.pipe - stage - 1) * (2 if plan.chunks > 1 else 1) + (plan.chunks - 1) * plan.pipe


# Memory


def _stage_memory(job: Job, plan: Plan, stage: int) -> dict[str, float]:
    b, parameters = job.recipe, sum(held_by(job, plan, stage))
    kinds = {
        "parameters": b.element * parameters / (plan.data if plan.zero == 3 else 1),
        "gradients": b.gradient * parameters / (plan.data if plan.zero >= 2 else 1),
        "optimizer": b.optimizer * parameters / (plan.data if plan.zero else 1),
        "activations": _activations(job, plan, stage),
        "buffers": 0.0,
    }
    if stage == plan.pipe - 1:
        kinds["buffers"] += (b.element + 8) * plan.micro_batch * job.context * job.model.vocabulary / plan.tensor
    if plan.zero >= 2:
        kinds["buffers"] += (b.gradient + (b.element if plan.zero == 3 else 0)) * _largest_pair(job, plan, stage)
    return kinds | {"total": sum(kinds.values())}


def _largest_pair(job: Job, plan: Plan, stage: int) -> float:
    """Return the largest sum of parameters of two neighbouring units in a chunk of this stage."""
    largest = 0.0
    for chunk in range(plan.chunks):
        units = unit_sizes(job, plan.tensor, plan.pipe * plan.chunks, chunk * plan.pipe + stage)
        sizes = [parameters for count, parameters in units for _ in range(min(count, 2))]
        largest = max(largest, *(sum(pair) for pair in pairwise((*sizes, 0.0))))
    return largest


def _activations(job: Job, plan: Plan, stage: int) -> float:
    # alive: number of forwards whose backward has not ended
    alive = min(plan.micro_batches(job) * plan.chunks, _warm_up(plan, stage) + 1)
    layers = max(spread(job.model.layers, plan.pipe * plan.chunks)[stage :: plan.pipe])
    full, saved = activation_bytes(job, plan.tensor, plan.micro_batch, plan.recompute)
    return alive * layers * saved + (full if plan.recompute == "full" else 0)


def activation_bytes(job: Job, tensor: int, micro_batch: int, recompute: str) -> tuple[float, float]:
    """Return the bytes that a layer keeps for backward of one micro-batch: (without recomputation, with `recompute`).

    For GPT: sbh (10 + 24/t + 5as/ht), and with sequence parallelism sbh/t (34 + 5as/h). The scores are 5as/ht. Full
    recomputation keeps 2sbh, with sequence parallelism 2sbh/t. Source: Korthikanti et al. 2022, equations 1 to 6. With
    fused attention, selective recomputation drops the outputs of both norms and of the activation (`Layers.light`).
    """
    m, b = job.model, job.recipe
    tokens, e = micro_batch * job.context, b.element
    stream = tokens * m.width
    kv = max(m.kv_heads, tensor) * m.dim / m.width
    hidden = m.hidden / m.width
    # between: inputs of two norms and two regions; two masks. inside: q, k, v, inputs of projection and feed-forward.
    between = 4 * e + (2 if b.dropout else 0)
    inside = e * (2 + 2 * kv) + e * hidden * (3 if m.gated else 2)
    scores = 0.0 if b.fused_attention else (2 * e + (1 if b.dropout else 0)) * m.heads * job.context / m.width
    shards = tensor if b.sequence else 1
    full = stream * (between / shards + (inside + scores) / tensor)
    light = scores / tensor if not b.fused_attention else e * (2 / shards + hidden / tensor)
    saved = {"none": full, "selective": full - stream * light, "full": e * stream / shards}
    return full, saved[recompute]


# The floor


@lru_cache(maxsize=65536)
def _times(
    job: Job, tensor: int, micro_batch: int, recompute: str, layers: int, first: bool, last: bool
) -> tuple[float, float]:
    """Return (forward seconds, backward seconds) of a part."""
    blocks = blocks_of(job, tensor, micro_batch, recompute, layers, first, last, 0)
    forward, backward = (sum((closed(block, job.cluster) or {}).values()) for block in blocks[:2])
    return forward, backward


def _bounds(job: Job, plan: Plan) -> Iterator[float]:
    """Yield the lower bound in seconds of each stage that may be slowest (`floor_s`)."""
    parts = plan.pipe * plan.chunks
    counts = spread(job.model.layers, parts)

    def part(i: int) -> float:
        return sum(_times(job, plan.tensor, plan.micro_batch, plan.recompute, counts[i], i == 0, i == parts - 1))

    micro_batches = plan.micro_batches(job)
    for stage in _distinct_stages(plan, slowest=True):
        arrival_s = part(0) + (stage - 1) * part(1) if stage else 0.0
        work = sum(part(chunk * plan.pipe + stage) for chunk in range(plan.chunks))
        yield arrival_s + micro_batches * work + _end_s(job, plan, stage)


def _distinct_stages(plan: Plan, slowest: bool = False) -> list[int]:
    """Return the first stage, the last, and one between: the fullest, or with `slowest` the last to finish."""
    between = plan.pipe - 2 if slowest else 1
    return sorted({0, min(between, plan.pipe - 1) if plan.pipe > 1 else 0, plan.pipe - 1})


def _end_s(job: Job, plan: Plan, stage: int) -> float:
    """Return the seconds after the last backward: gradient norm, optimizer step, and reductions that do not overlap."""
    seconds = 0.0
    for event in _end(job, plan, stage):
        if isinstance(event, Compute):
            seconds += compute_s(event, job.cluster.device)
        elif isinstance(event, Collective) and event.label in (DATA, NORM) and event.op != "all_gather":
            seconds += collective_s(event, job.cluster)
    return seconds
