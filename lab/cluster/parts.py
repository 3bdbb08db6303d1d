"""The parts of a model: the work of one micro-batch on a chunk, and the collectives of the data axis."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from .events import Block, Collective, Event, Program
from .jobs import Job, Plan, spread
from .layers import Layers

DATA, PIPE = "data", "pipe"


@dataclass(frozen=True)
class Unit:
    """Parameters that the data axis gathers in one collective: the embedding, one of `times` layers, or the head."""

    forward: Block
    backward: Block
    times: int
    parameters: float


@dataclass(frozen=True)
class Part:
    """The work of one micro-batch on a chunk of the model."""

    forward: Block
    backward: Block
    units: tuple[Unit, ...]
    before: int | None  # rank that sends its input; None for the first part
    after: int | None  # rank that receives its output; None for the last part
    message: float  # bytes
    scattered: tuple[Event, ...]  # the gather of a message that arrives in parts

    def arrived(self, backward: bool) -> list[Event]:
        return [] if (self.after if backward else self.before) is None else list(self.scattered)


def each_unit(units: Iterable[Unit]) -> Iterator[Unit]:
    for unit in units:
        yield from (unit,) * unit.times


def part_of(job: Job, plan: Plan, number: int) -> Part:
    """Part `number` of all pipe · chunks parts, in the order in which a micro-batch passes through them."""
    parts, stage = plan.pipe * plan.chunks, number % plan.pipe
    layers = spread(job.model.layers, parts)[number]
    first, last = number == 0, number == parts - 1
    first_rank = stage * plan.tensor
    forward, backward, pairs, scattered = blocks_of(
        job, plan.tensor, plan.micro_batch, plan.recompute, layers, first, last, first_rank
    )
    sizes = unit_sizes(job, plan.tensor, parts, number)
    units = tuple(Unit(*pair, *counts) for pair, counts in zip(pairs, sizes, strict=True))
    stream = job.recipe.element * plan.micro_batch * job.context * job.model.width
    split = plan.tensor if job.recipe.sequence or job.recipe.scatter_messages else 1
    before = None if first else (stage - 1) % plan.pipe * plan.tensor
    after = None if last else (stage + 1) % plan.pipe * plan.tensor
    return Part(forward, backward, units, before, after, stream / split, scattered)


@lru_cache(maxsize=4096)
def blocks_of(
    job: Job, tensor: int, micro_batch: int, recompute: str, layers: int, first: bool, last: bool, first_rank: int
) -> tuple[Block, Block, tuple[tuple[Block, Block], ...], Program]:
    """(forward, backward, pairs, gather) of one micro-batch through `layers` layers, and embedding and head if there.

    pairs: (forward, backward) of the embedding, of one layer, and of the head, as far as this part has them. gather:
    completes a message that arrives in parts.
    """
    layer = Layers(job.model, job.recipe, micro_batch, job.context, range(first_rank, first_rank + tensor))
    gather: list[Event] = []
    if job.recipe.scatter_messages and not job.recipe.sequence and tensor > 1:
        gather = [Collective("all_gather", layer.stream / tensor, layer.ranks, label=PIPE)]
    pairs = [(*_layer(layer, recompute), layers)]
    if first:
        pairs.insert(0, (Block(tuple(layer.embedding())), Block(tuple(layer.embedding_backward())), 1))
    if last:
        pairs.append((Block(tuple(layer.head())), Block(tuple(layer.head_backward())), 1))
    gather_x, gather_dy = (() if first else tuple(gather)), (() if last else tuple(gather))
    return (
        Block((*gather_x, *(Block((forward,), times) for forward, _, times in pairs)), name="forward"),
        Block((*gather_dy, *(Block((backward,), times) for _, backward, times in reversed(pairs))), name="backward"),
        tuple((forward, backward) for forward, backward, _ in pairs),
        tuple(gather),
    )


@lru_cache(maxsize=4096)
def _layer(layer: Layers, recompute: str) -> tuple[Block, Block]:
    return Block(tuple(layer.forward()), name="forward"), Block(tuple(layer.backward(recompute)), name="backward")


# Parameters, and the collectives of the data axis


@lru_cache(maxsize=65536)
def held_by(job: Job, plan: Plan, stage: int) -> tuple[float, ...]:
    """Parameters of each chunk of a stage's rank, before the data axis shards them."""
    parts = plan.pipe * plan.chunks
    return tuple(
        sum(times * count for times, count in unit_sizes(job, plan.tensor, parts, chunk * plan.pipe + stage))
        for chunk in range(plan.chunks)
    )


@lru_cache(maxsize=65536)
def unit_sizes(job: Job, tensor: int, parts: int, number: int) -> tuple[tuple[int, float], ...]:
    """(number of units, parameters of each) for a part's embedding, layers and head, on one rank."""
    m = job.model
    sharded, replicated = m.layer_weights()
    table, head, norm = m.ends
    positions = m.positions * m.width
    if m.kv_heads < tensor:  # some ranks hold the same heads
        sharded += 2 * m.width * m.dim * (tensor - m.kv_heads)
    units = [(spread(m.layers, parts)[number], sharded / tensor + replicated)]
    if number == 0:
        units.insert(0, (1, table / tensor + positions))
    if number == parts - 1:  # a tied head needs a second copy if the embedding is on another rank
        units.append((1, (head if head or parts == 1 else table) / tensor + norm - positions))
    return tuple(units)


def data_group(job: Job, plan: Plan, stage: int) -> range:
    """The data group of a stage's first rank."""
    return range(stage * plan.tensor, job.cluster.gpus, plan.pipe * plan.tensor)


def scattered(job: Job, plan: Plan, group: range, parameters: float, handle: int | None) -> Collective:
    """The reduction of gradients of `parameters` parameters: to all ranks (ZeRO 0), or each shard to its rank."""
    payload = job.recipe.gradient * parameters / (plan.data if plan.zero else 1)
    return Collective("reduce_scatter" if plan.zero else "all_reduce", payload, group, "backward", DATA, handle=handle)


def gathered(job: Job, plan: Plan, group: range, parameters: float, handle: int | None) -> Collective:
    """The gather of `parameters` parameters, of which each rank has a shard."""
    return Collective("all_gather", job.recipe.element * parameters / plan.data, group, "forward", DATA, handle=handle)
