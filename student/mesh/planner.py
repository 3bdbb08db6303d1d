"""Which mesh for this job? Try all on paper, drop what does not fit, price what promises most, and say what binds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab.cluster import steps
from lab.cluster.jobs import Job, Plan, unfit
from lab.provided import provided

MOST_SEQUENCES = 16  # of a micro-batch
MOST_CHUNKS = 8  # of a rank


@provided
@dataclass(frozen=True)
class Tools:
    """What may be asked about a plan. All but `price_s` are quick; that one plays a whole step on the cluster."""

    unfit: Callable[[Job, Plan], str] = unfit  # why it is no plan for this job; "" if it is one
    memory: Callable[[Job, Plan], float] = lambda job, plan: steps.memory(job, plan)["total"]  # bytes, fullest rank
    room: Callable[[Job], float] = lambda job: (1 - steps.RESERVED) * job.cluster.device.hbm_bytes
    floor_s: Callable[[Job, Plan], float] = steps.floor_s  # never more than price_s
    price_s: Callable[[Job, Plan], float] = lambda job, plan: steps.price(job, plan).step_s


@provided
@dataclass(frozen=True)
class Choice:
    """A plan that fits, and what it takes."""

    plan: Plan
    step_s: float
    memory: float


def candidates(job: Job, tools: Tools = Tools()) -> Iterator[Plan]:
    """Every plan of this job once, in any order, whether it fits in memory or not.

    All data · pipe · tensor that multiply to the cluster's devices; all micro-batches of 1 to MOST_SEQUENCES sequences,
    1 to MOST_CHUNKS chunks, the recipe's recomputation (job.recipe.checkpointing), and ZeRO 0 to 3, as far as
    `tools.unfit` has nothing against them.
    """
    raise NotImplementedError(
        "mesh.planner: Every plan of this job once, in any order, whether it fits in memory or not"
    )


def planner(job: Job, keep: int = 5, tools: Tools = Tools()) -> list[Choice]:
    """The `keep` fastest of all `candidates` that fit in `tools.room`, fastest first; all of them if there are fewer.

    What it returns is what pricing each of them would give. But it asks for no price of a plan that does not fit, for
    none twice, and for none whose floor is above the price of the last of those that it returns.

    Raises ValueError where keep < 1, and, in one line, where nothing fits: it names the plan that needs the least
    memory, as str(plan) does, with its need and the room in GB; or says that no plan at all is one for this job.
    """
    raise NotImplementedError(
        "mesh.planner: The `keep` fastest of all `candidates` that fit in `tools.room`, fastest first"
    )


def binds(job: Job, choice: Choice, tools: Tools = Tools()) -> dict[str, float]:
    """Share of the step that twice as much of each resource would save: what saves most is what binds.

    By name, of all in lab.cluster.hardware.RESOURCES. Of all but memory: the same plan on a cluster that is
    `job.cluster.faster(resource)`. With twice the memory another plan may be the fastest: the best of the planner's on
    that cluster. 0 where nothing is saved.
    """
    raise NotImplementedError("mesh.planner: Share of the step that twice as much of each resource would save")
