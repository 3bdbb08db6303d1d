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
    """Parameters that the data axis gathers in one collective: the embedding, each of `count` layers, or the head."""

    forward: Block
    backward: Block
    count: int
    parameters: float


@dataclass(frozen=True)
class Part:
    """The work of one micro-batch on a chunk of the model."""

    forward: Block
    backward: Block
    units: tuple[Unit, ...]
    previous_rank: int | None  # rank that sends its input; None for the first part
    next_rank: int | None  # rank that receives its output; None for the last part
    message: float  # bytes
    message_gather: tuple[Event, ...]  # completes a message that arrives in parts

    def input_gather(self, backward: bool) -> list[Event]:
        return [] if (self.next_rank if backward else self.previous_rank) is None else list(self.message_gather)


def each_unit(units: Iterable[Unit]) -> Iterator[Unit]:
    for unit in units:
        yield from (unit,) * unit.count


def part_of(job: Job, plan: Plan, number: int) -> Part:
    """Return part `number` of pipe · chunks parts. A micro-batch passes through them in this order."""
    parts, stage = plan.pipe * plan.chunks, number % plan.pipe
    layers = spread(job.model.layers, parts)[number]
    first, last = number == 0, number == parts - 1
    first_rank = stage * plan.tensor
    forward, backward, pairs, message_gather = blocks_of(
        job, plan.tensor, plan.micro_batch, plan.recompute, layers, first, last, first_rank
    )
    sizes = unit_sizes(job, plan.tensor, parts, number)
    units = tuple(Unit(*pair, *counts) for pair, counts in zip(pairs, sizes, strict=True))
    stream = job.recipe.element * plan.micro_batch * job.context * job.model.width
    split = plan.tensor if job.recipe.sequence or job.recipe.scatter_messages else 1
    previous_rank = None if first else (stage - 1) % plan.pipe * plan.tensor
    next_rank = None if last else (stage + 1) % plan.pipe * plan.tensor
    return Part(forward, backward, units, previous_rank, next_rank, stream / split, message_gather)


@lru_cache(maxsize=4096)
def blocks_of(
    job: Job, tensor: int, micro_batch: int, recompute: str, layer_count: int, first: bool, last: bool, first_rank: int
) -> tuple[Block, Block, tuple[tuple[Block, Block], ...], Program]:
    """Return (forward, backward, pairs, gather) of one micro-batch in a part.

    The part has `layer_count` layers, the embedding if it is the first, and the head if it is the last. pairs:
    (forward, backward) of embedding, one layer, head. gather: completes a message that arrives in parts.
    """
    kernels = Layers(job.model, job.recipe, micro_batch, job.context, range(first_rank, first_rank + tensor))
    message_gather: list[Event] = []
    if job.recipe.scatter_messages and not job.recipe.sequence and tensor > 1:
        message_gather = [Collective("all_gather", kernels.stream / tensor, kernels.ranks, label=PIPE)]
    repeated = [(*_layer(kernels, recompute), layer_count)]
    if first:
        repeated.insert(0, (Block(tuple(kernels.embedding())), Block(tuple(kernels.embedding_backward())), 1))
    if last:
        repeated.append((Block(tuple(kernels.head())), Block(tuple(kernels.head_backward())), 1))
    gather_x, gather_dy = (() if first else tuple(message_gather)), (() if last else tuple(message_gather))
    return (
        Block((*gather_x, *(Block((forward,), times) for forward, _, times in repeated)), name="forward"),
        Block((*gather_dy, *(Block((backward,), times) for _, backward, times in reversed(repeated))), name="backward"),
        tuple((forward, backward) for forward, backward, _ in repeated),
        tuple(message_gather),
    )


@lru_cache(maxsize=4096)
def _layer(kernels: Layers, recompute: str) -> tuple[Block, Block]:
    return Block(tuple(kernels.forward()), name="forward"), Block(tuple(kernels.backward(recompute)), name="backward")


# Parameters, and the collectives of the data axis


@lru_cache(maxsize=65536)
def held_by(job: Job, plan: Plan, stage: int) -> tuple[float, ...]:
    """Return the number of parameters of each chunk on one rank of a stage, before the data axis shards them."""
    parts = plan.pipe * plan.chunks
    return tuple(
        sum(count * parameters for count, parameters in unit_sizes(job, plan.tensor, parts, chunk * plan.pipe + stage))
        for chunk in range(plan.chunks)
    )


@lru_cache(maxsize=65536)
def unit_sizes(job: Job, tensor: int, parts: int, number: int) -> tuple[tuple[int, float], ...]:
    """Return (number of units, parameters per unit) for a part's embedding, layers and head, on one rank."""
    m = job.model
    sharded, replicated = m.layer_weights()
    embedding, head, norm_and_positions = m.ends
    positions = m.positions * m.width
    if m.kv_heads < tensor:  # several ranks hold the same heads
        sharded += 2 * m.width * m.dim * (tensor - m.kv_heads)
    units = [(spread(m.layers, parts)[number], sharded / tensor + replicated)]
    if number == 0:
        units.insert(0, (1, embedding / tensor + positions))
    if number == parts - 1:  # a tied head needs a second copy if the embedding is on another rank
        units.append((1, (head if head or parts == 1 else embedding) / tensor + norm_and_positions - positions))
    return tuple(units)


def data_group(job: Job, plan: Plan, stage: int) -> range:
    """Return the ranks of the data group that contains the stage's first rank."""
    return range(stage * plan.tensor, job.cluster.gpus, plan.pipe * plan.tensor)


def reduction(job: Job, plan: Plan, group: range, parameters: float, handle: int | None) -> Collective:
    """Return the collective that reduces gradients: an all-reduce with ZeRO 0, otherwise a reduce-scatter."""
    payload = job.recipe.gradient * parameters / (plan.data if plan.zero else 1)
    return Collective("reduce_scatter" if plan.zero else "all_reduce", payload, group, "backward", DATA, handle=handle)


def gather(job: Job, plan: Plan, group: range, parameters: float, handle: int | None) -> Collective:
    """Return the all-gather of `parameters` parameters, which the ranks of the data group hold as shards."""
    return Collective("all_gather", job.recipe.element * parameters / plan.data, group, "forward", DATA, handle=handle)
