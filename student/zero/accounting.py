"""Bytes that each stage of ZeRO keeps on a rank and sends, counted from the sizes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Share:
    """Bytes of a training step on the rank with the most."""

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
    """Return the bytes that a rank keeps between steps, and sends in one step of AdamW.

    sizes: elements of each parameter. precision: "float32" keeps parameters, gradients and two moments in 4 bytes each;
    "mixed" keeps parameters and gradients in 2 bytes, and float32 master weights beside the moments. activations: bytes
    for a rank's own micro-batch, as `mixed_precision.accounting` counts them; no stage changes them. Sharding lays the
    parameters end to end, pads them to a multiple of W, and gives each rank n = ⌈Σ sizes / W⌉ elements. Padding is kept
    and sent like any other element.

    - "none": data parallelism. One all-reduce of all gradients per step: Σ sizes elements.
    - "zero1": `ShardedOptimizer`. Whole tensors have their state on one rank: the largest first, each goes to the rank
      with the fewest elements so far. Gradients are all-reduced, without padding. Then the owner broadcasts each
      tensor. It sends W − 1 copies; per rank, averaged over ranks, that is (W − 1)/W of the tensor's bytes.
    - "p_os": the paper's first stage. Gradients stay whole and are reduce-scattered once per step; each rank updates
      its n elements; parameters are all-gathered.
    - "zero2": the same, but gradients are reduce-scattered in each of `micro_batches`, and only n elements are kept.
    - "zero3": parameters are sharded, too: all-gathered for forward and again for backward, in every micro-batch.
      Temporarily gathered parameters are not counted.

    On a ring, a reduce-scatter or an all-gather sends (W − 1) parts of n elements, and an all-reduce 2(W − 1)/W of its
    bytes. Bytes sent are rounded down once, at the end. Example: 7.5e9 parameters on 64 ranks in mixed precision take
    120.0 GB ("none"), 31.4 ("p_os"), 16.6 ("zero2") or 1.9 ("zero3").
    Source: Rajbhandari et al. 2019, "ZeRO", sections 5 and 7, figure 1.
    """
    raise NotImplementedError(
        "zero.accounting: Return the bytes that a rank keeps between steps, and sends in one step of AdamW"
    )
