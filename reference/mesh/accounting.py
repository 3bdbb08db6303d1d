"""The cost of a step on a mesh, on paper: FLOPs, bytes by axis, bubble, memory, and when the network is the limit."""

import math
from dataclasses import dataclass

from lab.model.transformer import Config
from lab.provided import provided


@provided
@dataclass(frozen=True)
class Degrees:
    """Number of ranks along each axis."""

    data: int = 1
    pipe: int = 1
    expert: int = 1
    tensor: int = 1


@provided
@dataclass(frozen=True)
class Workload:
    """A model and the data of one step.

    config: of `lab.model.transformer.Transformer`, with an untied head. sequences: of the whole batch, each of
    `context` tokens, in `micro_batches` of equal size. experts: 0 for dense SwiGLUs, else the number of experts in
    every block, with k experts per token. Everything is in float32, 4 bytes.
    """

    config: Config
    sequences: int
    context: int
    micro_batches: int = 1
    experts: int = 0
    k: int = 2


@provided
@dataclass(frozen=True)
class Cost:
    """The cost of one step for a rank of one stage."""

    flops: int  # matrix products, forward and backward
    parameters: int  # held, before the data axis shards them
    bytes: dict[str, float]  # sent, by axis: "tensor", "expert", "pipe", "data", and "data×expert"
    bubble: float  # idle over busy time of the pipeline
    memory: float  # bytes of parameters, gradients and AdamW's two moments


@provided
@dataclass(frozen=True)
class Device:
    """Rates of one rank. bytes_per_s: along each axis, on all axes at the same time."""

    flops_per_s: float
    bytes_per_s: float


@provided
@dataclass(frozen=True)
class Times:
    """Seconds of a feed-forward layer's forward: compute, and communication along data and tensor."""

    compute_s: float
    data_s: float
    tensor_s: float

    def step_s(self, overlap: bool) -> float:
        """overlap: products, data and tensor all run at once; else one after the other."""
        parts = (self.compute_s, self.data_s, self.tensor_s)
        return max(parts) if overlap else sum(parts)

    def bound(self, overlap: bool) -> bool:
        """Return whether communication takes longer than compute: the longest part with overlap, else the sum."""
        sent = (self.data_s, self.tensor_s)
        return (max(sent) if overlap else sum(sent)) > self.compute_s


def accounting(work: Workload, degrees: Degrees, *, stage: int = 0, fsdp: bool = False) -> Cost:
    """Return the cost of one step for a rank of pipeline stage `stage`, on data × pipe × expert × tensor (D, P, E, T).

    A stage has layers / P blocks; the first stage also has the embedding, the last the final norm and the head. The
    batch is divided over D·E ranks. Bytes are those that a rank sends on a ring: (W − 1)/W · S for a reduce-scatter,
    all-gather or all-to-all of S bytes in total, and twice as many for an all-reduce. Routing to experts is even.

    flops: per token, 6 for each weight of a linear layer, and 6 · context · width per block for attention's causal
    products. Divide by T, except for experts and router, which every tensor rank computes. Only a token's k experts
    count.
    parameters: divide attention, SwiGLU, embedding and head by T, but not norms, router and the n/E experts.
    bytes: over all micro-batches. Z is the size of this rank's activations, tokens · width, in bytes.

    - tensor: for attention one all-reduce of Z in forward and one in backward; the same for a dense SwiGLU. One in
      forward for the embedding, one in backward for the head. The loss has two all-reduces of 4-byte numbers, with 1
      and 2 numbers per token.
    - expert: four all-to-alls of k·Z per block, and one of 8 · experts bytes of counts per micro-batch and block.
    - pipe: Z to the next stage, and Z to the previous stage.
    - "data×expert": one all-reduce of all gradients except those of experts, and one of the 2 · experts + 1 numbers of
      the balancing loss per micro-batch and block with experts. "data": one all-reduce of the gradients of experts.
    - With fsdp, "data" instead carries, per micro-batch, two all-gathers of all parameters (forward and backward) and
      one reduce-scatter of all gradients. Then "expert" carries one more all-reduce per step, of the shard (1/D) of all
      gradients except those of experts, which "data×expert" no longer carries.

    bubble: (P − 1) / micro_batches. memory: 16 bytes per parameter, with fsdp 1/D of that; activations do not count.
    Example: "tiny" of lab.model.transformer, 8 sequences of 256, data=2, tensor=2: 0.43 GFLOP, 62,784 parameters,
    251,136 bytes along data×expert, and 2,633,728 along tensor.
    Raises ValueError if degrees do not divide: layers by P; heads, kv_heads, hidden and vocabulary by T; experts by E;
    sequences by D · E · micro_batches. Also if E > 1 without experts, or if there is no such stage.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 3.
    """
    c, d = work.config, degrees
    _check(work, d, stage)
    tokens = work.sequences * work.context // (d.data * d.expert)
    stream = 4 * tokens * c.width
    blocks, first, last = c.layers // d.pipe, stage == 0, stage == d.pipe - 1
    attention = 2 * c.width * (c.width + c.kv_heads * c.dim)
    swiglu = 3 * c.width * c.hidden
    table = c.vocabulary * c.width

    expert_parameters = blocks * work.experts // d.expert * swiglu
    split = blocks * (attention + (0 if work.experts else swiglu)) + (first + last) * table
    replicated = blocks * (2 * c.width + work.experts * c.width) + last * c.width
    dense_parameters = split // d.tensor + replicated

    split_weights = blocks * (attention + (0 if work.experts else swiglu)) + last * table
    whole_weights = blocks * (work.experts * c.width + work.k * swiglu) if work.experts else 0
    scores = 6 * tokens * blocks * work.context * c.width
    flops = (6 * tokens * split_weights + scores) // d.tensor + 6 * tokens * whole_weights

    reduced = blocks * (2 if work.experts else 4) + first + last
    tensor = _all_reduce(reduced * stream + last * 3 * 4 * tokens, d.tensor)
    there_and_back = work.k * 4 * stream + work.micro_batches * 8 * work.experts
    expert = _ring(blocks * there_and_back, d.expert) if work.experts else 0.0
    pipe = float((not last) * stream + (not first) * stream)
    statistics = work.micro_batches * blocks * 4 * (2 * work.experts + 1) if work.experts else 0
    both = _all_reduce(statistics, d.data * d.expert)
    if fsdp:
        data = 3 * work.micro_batches * _ring(4 * (dense_parameters + expert_parameters), d.data)
        expert += _all_reduce(4 * dense_parameters / d.data, d.expert)
    else:
        both += _all_reduce(4 * dense_parameters, d.data * d.expert)
        data = _all_reduce(4 * expert_parameters, d.data)

    parameters = dense_parameters + expert_parameters
    sent = {"tensor": tensor, "expert": expert, "pipe": pipe, "data": data, "data×expert": both}
    return Cost(flops, parameters, sent, (d.pipe - 1) / work.micro_batches, 16 * parameters / (d.data if fsdp else 1))


def layer_times(
    tokens: float, width: int, hidden: int, *, data: int, tensor: int, device: Device, element: int = 2,
    sharded: bool = True,
) -> Times:  # fmt: skip
    """Return the times of y = f(x A) B in forward on data × tensor ranks.

    x: (tokens, width), A: (width, hidden), B: (hidden, width). Compute: 4 · tokens · width · hidden FLOPs, divided by
    all ranks. Tensor: x is all-gathered before A and y reduce-scattered after B, both for the tokens of one data rank.
    Data, if parameters are sharded (FSDP): the tensor rank's parts of A and B are all-gathered; otherwise forward sends
    nothing along data. Collectives run on a ring, with `element` bytes per number. Backward has twice the products.
    Along data it sends twice as much (FSDP gathers and reduce-scatters), so its ratio is the same. Along tensor it
    sends as much as forward (it gathers the gradient of y and reduce-scatters that of x), so forward is the stricter
    half. Without sharding, backward sends one all-reduce along data, so sharded=True gives its ratio, too.
    """
    compute_s = 4 * tokens * width * hidden / (data * tensor) / device.flops_per_s
    weights = 2 * element * width * hidden / tensor
    streams = 2 * element * tokens / data * width
    data_s = _ring(weights, data) / device.bytes_per_s if sharded else 0.0
    return Times(compute_s, data_s, _ring(streams, tensor) / device.bytes_per_s)


def fewest_tokens(
    width: int, hidden: int, *, data: int, tensor: int, device: Device, overlap: bool, element: int = 2
) -> float:
    """Return the tokens of the whole batch below which a layer with FSDP × tensor is communication-bound.

    The result need not be whole. Compute and the bytes along tensor grow with tokens; the bytes along data do not. So
    for T = 1 the limit is tokens / D = (D − 1)/D · C·β · element/2, with or without overlap, where C is the device's
    FLOP/s and β its seconds per byte. If T is too large, no number of tokens is enough, and the result is infinity. It
    is 0 if nothing is sent along data and tensor takes no longer than compute.
    Example: 1e15 FLOP/s, 1e11 bytes/s, 2 bytes and D = 8 give 8,750 tokens per data rank.
    Source: Austin et al. 2025, "How to Scale Your Model", chapter 5.
    """
    one = layer_times(1, width, hidden, data=data, tensor=tensor, device=device, element=element)
    spare_s = one.compute_s - (0.0 if overlap else one.tensor_s)  # a token
    if spare_s < 0 or one.tensor_s > one.compute_s or (spare_s == 0 and one.data_s):
        return math.inf
    return one.data_s / spare_s if one.data_s else 0.0


def best_split(
    ranks: int, tokens: float, width: int, hidden: int, *, device: Device, overlap: bool, element: int = 2
) -> tuple[int, int]:
    """Return the (data, tensor) of `ranks` ranks with the shortest step_s; of ties (1e-9), the smallest tensor."""
    splits = [(ranks // tensor, tensor) for tensor in range(1, ranks + 1) if ranks % tensor == 0]
    times = [
        layer_times(tokens, width, hidden, data=d, tensor=t, device=device, element=element).step_s(overlap)
        for d, t in splits
    ]
    return next(split for split, s in zip(splits, times, strict=True) if s <= min(times) * (1 + 1e-9))


def _ring(size: float, world: int) -> float:
    """Bytes that a rank sends in one direction of a ring."""
    return (world - 1) / world * size


def _all_reduce(size: float, world: int) -> float:
    return 2 * _ring(size, world)


def _check(work: Workload, d: Degrees, stage: int) -> None:
    c, shares = work.config, d.data * d.expert * work.micro_batches
    divided = [
        ("layers", c.layers, d.pipe), ("heads", c.heads, d.tensor), ("kv_heads", c.kv_heads, d.tensor),
        ("hidden", c.hidden, d.tensor), ("vocabulary", c.vocabulary, d.tensor), ("experts", work.experts, d.expert),
        ("sequences", work.sequences, shares),
    ]  # fmt: skip
    for name, count, degree in divided:
        if count % degree:
            raise ValueError(f"expected {name} a multiple of {degree}, got {count} on {d}")
    if d.expert > 1 and not work.experts:
        raise ValueError(f"expected experts above 0 where the expert axis is {d.expert}, got none")
    if not 0 <= stage < d.pipe:
        raise ValueError(f"expected a stage of 0 to {d.pipe - 1}, got {stage}")
