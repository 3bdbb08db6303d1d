"""GPipe, the first pipeline schedule: all forwards, then all backwards."""

from lab.cluster.schedule import Action


def schedule_gpipe(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of `rank` in a pipeline of `stages` ranks: all forwards, then all backwards.

    Micro-batches go forward in the order 0, 1, …, and backward in any order that is the same on all ranks. The pipeline
    fills and empties once. If backwards take twice as long as forwards, idle time over busy time is (p − 1)/m for p
    stages and m micro-batches. Each rank keeps the activations of all m. Raises ValueError unless 0 ≤ rank < stages and
    micro_batches ≥ 1. Source: Huang et al. 2018, "GPipe", section 2.3.
    """
    raise NotImplementedError("mesh.schedule_gpipe: Return the actions of `rank` in a pipeline of `stages` ranks")
