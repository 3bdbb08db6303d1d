"""The first pipeline schedule: everything forward, then everything back."""

from lab.cluster.schedule import Action


def schedule_gpipe(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """What `rank` of a pipeline of `stages` ranks does, in order: all forwards, then all backwards.

    Micro-batches go forward as 0, 1, …, and back in one order that is the same on all ranks. The pipeline fills and
    empties once: with backwards twice as long as forwards, idle over busy time is (p − 1)/m for p stages and m
    micro-batches. Each rank keeps the activations of all m. Raises ValueError unless 0 ≤ rank < stages and
    micro_batches ≥ 1. Source: Huang et al. 2018, "GPipe", section 2.3.
    """
    raise NotImplementedError("mesh.schedule_gpipe: What `rank` of a pipeline of `stages` ranks does, in order")
