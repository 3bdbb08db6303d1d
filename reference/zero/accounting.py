"""What each stage of ZeRO keeps on a rank and what it sends, counted from the sizes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Share:
    """Bytes of a training step on the rank that has most."""

    parameters: int
    gradients: int
    optimizer: int  # AdamW's two moments, and float32 master weights in mixed precision
    activations: int
    sent: int  # bytes of all messages of one step that the rank sends, by the ring

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def accounting(
    sizes: Sequence[int],
    world: int,
    *,
    method: Literal["none", "zero1", "p_os", "zero2", "zero3"],
    precision: Literal["float32", "mixed"],
    activations: int = 0,
    micro_batches: int = 1,
) -> Share:
    """Bytes a rank keeps between steps and sends in one step of AdamW on parameters of `sizes` elements.

    precision: "float32" has parameters, gradients and two moments in 4 bytes each; "mixed" has parameters and gradients
    in 2 bytes, and a float32 master beside the moments. activations: bytes, of a rank's own micro-batch, as
    `mixed_precision.accounting` counts them; no stage changes them. What is shared out evenly is the parameters end to
    end, padded to a multiple of W: n = ⌈Σ sizes / W⌉ elements a rank. The padding is kept and sent like any other
    element.

    - "none": data parallel; gradients are all-reduced once a step, Σ sizes elements of them.
    - "zero1": as `ShardedOptimizer`: state by whole tensors, the largest first to the rank that has least; gradients
      all-reduced, unpadded; then every tensor is broadcast by its owner: (W − 1)/W of its bytes for each rank, which is
      the mean over ranks, the owner's own way of W − 1 copies shared among all.
    - "p_os": as the paper has it: gradients reduce-scattered once a step, whole until then; each rank updates its n
      elements; parameters all-gathered.
    - "zero2": the same, but gradients are reduce-scattered in every one of `micro_batches`, and only n elements kept.
    - "zero3": n elements of parameters too: all-gathered for forward and again for backward, in every micro-batch. What
      is gathered for the moment is not counted.

    By the ring a reduce-scatter or an all-gather sends (W − 1) parts of n elements, an all-reduce 2(W − 1)/W of its
    bytes. Bytes sent are rounded down, once, at the end. 7.5e9 parameters, 64 ranks, mixed: 120.0 GB ("none"),
    31.4 ("p_os"), 16.6 ("zero2"), 1.9 ("zero3").
    Source: Rajbhandari et al. 2019, "ZeRO", sections 5 and 7, figure 1.
    """
    small = 4 if precision == "float32" else 2  # a parameter, a gradient
    state = 8 if precision == "float32" else 12
    whole = sum(sizes)
    part = -(-whole // world)
    gather = scatter = (world - 1) * part * small  # one all-gather, one reduce-scatter
    all_reduce = 2 * (world - 1) * whole * small
    if method == "none":
        return Share(small * whole, small * whole, state * whole, activations, all_reduce // world)
    if method == "zero1":
        sent = (all_reduce + (world - 1) * whole * small) // world
        return Share(small * whole, small * whole, state * _largest_share(sizes, world), activations, sent)
    if method == "p_os":
        return Share(small * whole, small * whole, state * part, activations, scatter + gather)
    if method == "zero2":
        return Share(small * whole, small * part, state * part, activations, micro_batches * scatter + gather)
    sent = micro_batches * (2 * gather + scatter)
    return Share(small * part, small * part, state * part, activations, sent)


def _largest_share(sizes: Sequence[int], world: int) -> int:
    """Elements of the rank that owns most."""
    shares = [0] * world
    for size in sorted(sizes, reverse=True):
        shares[shares.index(min(shares))] += size
    return max(shares)
