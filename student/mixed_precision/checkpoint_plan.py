"""Where to put checkpoints if layers are unequal: the segments with the lowest peak, exactly."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Plan:
    """segments: number of layers in each, in order. peak: bytes kept at the worst moment of backward."""

    segments: tuple[int, ...]
    peak: int


def checkpoint_plan(inputs: Sequence[int], saved: Sequence[int]) -> Plan:
    """Divide a chain of layers into checkpointed segments with the lowest peak that one recomputation allows.

    inputs[i]: bytes of layer i's input. saved[i]: bytes that autograd keeps for layer i, including its input. Forward
    keeps the input of every segment. Backward takes segments from last to first: it runs a segment again, keeps
    everything that its layers save, differentiates it, and frees all of that and the segment's input. So with segments
    S₁ … S_k

        peak = max over j of ( inputs of S₁ … S_{j−1}  +  Σ_{i in S_j} saved[i] ).

    Returns any plan with the lowest peak. Raises ValueError for no layers, or lists of different lengths.
    Example: if all inputs and saved are 1, k·(k + 1) / 2 layers fit into a peak of k. The first segments are longer,
    and the peak of N layers is about √(2N); equal segments of √N layers need 2√N − 1.
    Source: Chen et al. 2016, section 4.
    """
    raise NotImplementedError(
        "mixed_precision.checkpoint_plan: Divide a chain of layers into checkpointed segments with the lowest peak …"
    )


def recursive_bound(layers: int) -> tuple[int, int]:
    """Return (kept, runs) of recursive checkpointing for `layers` ≥ 1 equal layers.

    Backward through a chain whose input is kept: run its first half (half of the layers, rounded down), keep the result
    in the middle, go backward through the second half in the same way, drop the middle, then go through the first half.
    A single layer runs with autograd. kept: most inputs kept at one time, including the chain's own: ⌈log₂ layers⌉ + 1.
    runs: total number of layer runs after the first forward pass.
    Example: 1,024 layers keep 11 inputs and run 6,144 times, six times per layer.
    Source: Chen et al. 2016, section 4.4.
    """
    raise NotImplementedError(
        "mixed_precision.checkpoint_plan: Return (kept, runs) of recursive checkpointing for `layers` ≥ 1 equal layers"
    )
