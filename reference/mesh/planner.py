"""Plan a job: try all meshes on paper, drop those that do not fit, price the promising ones, name the bottleneck."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lab.cluster import steps
from lab.cluster.hardware import RESOURCES
from lab.cluster.jobs import RECOMPUTE, Job, Plan, unfit
from lab.provided import provided

MOST_SEQUENCES = 16  # of a micro-batch
MOST_CHUNKS = 8  # of a rank


@provided
@dataclass(frozen=True)
class Tools:
    """Functions of a plan. All are quick except `price_s`, which simulates a whole step on the cluster."""

    unfit: Callable[[Job, Plan], str] = unfit  # why it is no plan for this job; "" if it is one
    memory: Callable[[Job, Plan], float] = lambda job, plan: steps.memory(job, plan)["total"]  # bytes, fullest rank
    room: Callable[[Job], float] = lambda job: (1 - steps.RESERVED) * job.cluster.device.hbm_bytes
    floor_s: Callable[[Job, Plan], float] = steps.floor_s  # never more than price_s
    price_s: Callable[[Job, Plan], float] = lambda job, plan: steps.price(job, plan).step_s


@provided
@dataclass(frozen=True)
class Choice:
    """A plan that fits, with its time and memory."""

    plan: Plan
    step_s: float
    memory: float


def candidates(job: Job, tools: Tools = Tools()) -> Iterator[Plan]:
    """Yield every plan of this job once, in any order, whether it fits in memory or not.

    Plans combine all data · pipe · tensor whose product is the number of devices, all micro-batches of 1 to
    MOST_SEQUENCES sequences, 1 to MOST_CHUNKS chunks, each recomputation of RECOMPUTE, and ZeRO 0 to 3.
    Leave out a plan if `tools.unfit` gives a reason against it.
    """
    gpus = job.cluster.gpus
    for tensor in _divisors(gpus):
        for pipe in _divisors(gpus // tensor):
            data = gpus // tensor // pipe
            if job.sequences % data:
                continue
            for micro_batch in _divisors(job.sequences // data, MOST_SEQUENCES):
                for chunks in range(1, MOST_CHUNKS + 1):
                    plan = Plan(data, pipe, tensor, micro_batch, chunks)
                    if tools.unfit(job, plan):
                        continue
                    for recompute in RECOMPUTE:
                        for zero in range(4):
                            one = replace(plan, recompute=recompute, zero=zero)
                            if not tools.unfit(job, one):
                                yield one


def planner(job: Job, keep: int = 5, tools: Tools = Tools()) -> list[Choice]:
    """Return the `keep` fastest `candidates` that fit in `tools.room`, fastest first; all of them if there are fewer.

    The result is the same as if each were priced. But never price a plan that does not fit, no plan twice, and no plan
    whose floor is above the price of the last returned plan.

    Raises ValueError if keep < 1, and, in one line, if nothing fits. That line names the plan with the least memory, as
    str(plan) does, its memory and the room in GB, as 1.5; or it says that there is no plan for this job.
    """
    if keep < 1:
        raise ValueError(f"expected keep of at least 1, got {keep}")
    sized = [(plan, tools.memory(job, plan)) for plan in candidates(job, tools)]
    room = tools.room(job)
    fitting = [(tools.floor_s(job, plan), plan, size) for plan, size in sized if size <= room]
    if not sized:
        raise ValueError(f"no data x pipe x tensor of {job.cluster.gpus} devices is one for this model and batch")
    if not fitting:
        plan, size = min(sized, key=lambda pair: pair[1])
        raise ValueError(
            f"nothing fits: {plan} needs least, {size / 1e9:.1f} GB, and there is room for {room / 1e9:.1f}"
        )
    best: list[Choice] = []
    worst = math.inf
    for floor, plan, size in sorted(fitting):
        if floor > worst:
            break  # nor can what follows be faster
        best.append(Choice(plan, tools.price_s(job, plan), size))
        best = sorted(best, key=lambda choice: choice.step_s)[:keep]
        worst = best[-1].step_s if len(best) == keep else math.inf
    return best


def binds(job: Job, choice: Choice, tools: Tools = Tools()) -> dict[str, float]:
    """Return the share of the step that twice as much of each resource would save; the largest is the bottleneck.

    The keys are those of lab.cluster.hardware.RESOURCES. For all except memory, run the same plan on
    `job.cluster.faster(resource)`. With twice the memory another plan may be the fastest, so take the planner's best on
    that cluster. The share is 0 if nothing is saved.
    """
    saved = {}
    for resource in RESOURCES:
        faster = replace(job, cluster=job.cluster.faster(resource))
        plan_s = planner(faster, 1, tools)[0].step_s if resource == "memory" else tools.price_s(faster, choice.plan)
        saved[resource] = max(0.0, 1 - plan_s / choice.step_s)
    return saved


def _divisors(number: int, largest: float = math.inf) -> list[int]:
    return [d for d in range(1, int(min(number, largest)) + 1) if number % d == 0]
