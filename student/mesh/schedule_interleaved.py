"""Interleaved 1F1B: each rank has several chunks of the model; the bubble shrinks, and messages multiply."""

from lab.cluster.schedule import Action


def schedule_interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Return the actions of `rank` in a pipeline of `stages` ranks, with `chunks` chunks of the model on each rank.

    Chunk c of rank r is virtual stage c · stages + r, so each micro-batch visits a rank `chunks` times. Micro-batches
    go in groups of `stages`: a group goes forward through chunk 0, then through chunk 1, …; then the next group starts.
    Backward does the same, from the last chunk to the first. After a warm-up, forwards and backwards alternate. With p
    stages, m micro-batches and v ≥ 2 chunks, a rank keeps the activations of at most
    min(v·m, 2(p − 1 − rank) + (v − 1)·p + 1) forwards of a chunk, and idle time over busy time is (p − 1)/(v·m). With
    one chunk it is 1F1B, for any micro_batches.

    Raises ValueError unless 0 ≤ rank < stages, micro_batches ≥ 1, chunks ≥ 1 and, if chunks > 1, micro_batches is a
    multiple of stages. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
    section 2.2.2 and figure 4.
    """
    raise NotImplementedError(
        "mesh.schedule_interleaved: Return the actions of `rank` in a pipeline of `stages` ranks, with `chunks` …"
    )
