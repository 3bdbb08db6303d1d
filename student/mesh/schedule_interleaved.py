"""A smaller bubble for more messages: each rank has several chunks of the model, and takes turns."""

from lab.cluster.schedule import Action


def schedule_interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """What `rank` of a pipeline of `stages` ranks does, in order, with `chunks` chunks of the model on each rank.

    Chunk c of rank r is virtual stage c · stages + r: micro-batches come round `chunks` times. They go in groups of
    `stages`: a group forward through chunk 0, then through chunk 1, …; then the next group. Back alike, from the last
    chunk to the first. After a warm-up, forward and backward in turn. With p stages, m micro-batches and v ≥ 2 chunks a
    rank keeps the activations of at most min(v·m, 2(p − 1 − rank) + (v − 1)·p + 1) forwards of a chunk, and idle over
    busy time is (p − 1)/(v·m). With one chunk it is 1F1B, for any micro_batches.

    Raises ValueError unless 0 ≤ rank < stages, micro_batches ≥ 1, chunks ≥ 1 and, where chunks > 1, micro_batches is a
    multiple of stages. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
    section 2.2.2 and figure 4.
    """
    raise NotImplementedError(
        "mesh.schedule_interleaved: What `rank` of a pipeline of `stages` ranks does, in order, with `chunks` chunks …"
    )
