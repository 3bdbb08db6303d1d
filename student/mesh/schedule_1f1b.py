"""One forward, one backward: the pipeline schedule that frees activations as early as possible."""

from lab.cluster.schedule import Action


def schedule_1f1b(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of `rank` in a pipeline of `stages` ranks: a few forwards, then one forward, one backward.

    Micro-batches go forward and backward in the order 0, 1, …. A rank starts only as many forwards as it needs until
    the first gradient arrives. So it keeps the activations of at most min(m, p − rank) of m micro-batches, with p
    stages. Idle time over busy time is (p − 1)/m, as in GPipe. Raises ValueError unless 0 ≤ rank < stages and
    micro_batches ≥ 1.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.1.
    """
    raise NotImplementedError("mesh.schedule_1f1b: Return the actions of `rank` in a pipeline of `stages` ranks")
