"""The schedule that frees memory as soon as it can: one forward, one backward."""

from lab.cluster.schedule import Action


def schedule_1f1b(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """What `rank` of a pipeline of `stages` ranks does, in order: a few forwards, then forward and backward in turn.

    Micro-batches go forward and back as 0, 1, …. A rank starts only as many as it takes until the first comes back, so
    it keeps the activations of at most min(m, p − rank) of m micro-batches, p stages; idle over busy time is GPipe's,
    (p − 1)/m. Raises ValueError unless 0 ≤ rank < stages and micro_batches ≥ 1.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.1.
    """
    if not (0 <= rank < stages and micro_batches >= 1):
        raise ValueError(
            f"expected 0 <= rank < stages and micro_batches >= 1, got {rank}, {stages} and {micro_batches}"
        )
    forwards = [Action("forward", i) for i in range(micro_batches)]
    backwards = [Action("backward", i) for i in range(micro_batches)]
    warm_up = min(stages - 1 - rank, micro_batches)
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):  # the steady state
        actions += [forward, backward]
    return actions + backwards[micro_batches - warm_up :]  # cool-down
