"""Where to put checkpoints when layers are unequal: the segments with the lowest peak, exactly."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Plan:
    """segments: how many layers each has, in order. peak: bytes kept at the worst moment of backward."""

    segments: tuple[int, ...]
    peak: int


def checkpoint_plan(inputs: Sequence[int], saved: Sequence[int]) -> Plan:
    """Cut a chain of layers into checkpointed segments so that the peak is as low as one recomputation allows.

    inputs[i]: bytes of layer i's input. saved[i]: bytes that autograd keeps for layer i when it runs with it, its input
    among them. Forward keeps the input of every segment. Backward takes segments from the last to the first: it runs
    one again, keeping all that its layers keep, goes back through it, and frees that together with the segment's input.
    So with segments S₁ … S_k

        peak = max over j of ( inputs of S₁ … S_{j−1}  +  Σ_{i in S_j} saved[i] ).

    Returns a plan of the lowest peak; any of several. Raises ValueError for no layers, or lists of different lengths.
    With inputs and saved of 1, k·(k + 1) / 2 layers fit into a peak of k: the first segments are longer, and the peak
    of N layers is about √(2N), where equal segments of √N need 2√N − 1. Source: Chen et al. 2016, section 4.
    """
    raise NotImplementedError(
        "mixed_precision.checkpoint_plan: Cut a chain of layers into checkpointed segments so that the peak is as low …"
    )


def recursive_bound(layers: int) -> tuple[int, int]:
    """(kept, runs) when checkpointing is applied to itself, for `layers` ≥ 1 equal layers.

    To go back through a chain whose input is kept: run its first half (half of the layers, rounded down) to the middle,
    keep that, go back through the second half in the same way, drop the middle, then through the first half. A single
    layer is run with autograd. kept: the most inputs kept at one time, the chain's own among them: ⌈log₂ layers⌉ + 1.
    runs: how many times a layer runs after the first forward pass. 1,024 layers: 11 kept, 6,144 runs, six a layer.
    Source: Chen et al. 2016, section 4.4.
    """
    raise NotImplementedError(
        "mixed_precision.checkpoint_plan: (kept, runs) when checkpointing is applied to itself, for `layers` ≥ 1 …"
    )
