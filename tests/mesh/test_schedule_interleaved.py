"""Interleaved 1F1B: v chunks a rank, and a bubble v times smaller.

What must be true: each rank's list has every action of each of its chunks once, and all lists together run to the end;
idle over busy time is (p − 1)/(v·m); rank r keeps at most 2(p − 1 − r) + (v − 1)p + 1 activations of a chunk. How it
would be faked: chunk after chunk as 1F1B each (the bubble stays (p − 1)/m or grows); everything forward first (the
right bubble, but all v·m activations); the warm-up of 1F1B (nothing comes back so early: ranks wait, or for ever).
"""

from __future__ import annotations

from lab.cluster.schedule import drawn
from lab.harness.pytest_plugin import exercise

from . import probes_pipeline as probes
from .schedules import before_the_first_backward, draw_cases, holds_the_bubble, most_alive, played, refuses, title

INTERLEAVED = "mesh.schedule_interleaved"


def judged(run, cases):
    return zip(cases, run(probes.listed, "schedule_interleaved", cases), strict=True)


@exercise(INTERLEAVED, kind="numerics")
def test_every_action_is_there_once_and_none_waits_for_ever(run, rng):
    for case, ranks in judged(run, draw_cases(rng, chunks=2)):
        played(ranks, case[1], case[2], what=title(case))


@exercise(INTERLEAVED, kind="numerics")
def test_with_one_chunk_any_number_of_micro_batches_will_do(run, rng):
    for case, ranks in judged(run, [[*case, 1] for case in draw_cases(rng)]):
        played(ranks, case[1], what=title(case))


@exercise(INTERLEAVED, kind="numerics")
def test_what_is_no_pipeline_is_refused(run, rng):
    also = ([0, 2, 4, 0], [1, 2, 2, -1], [0, 3, 4, 2], [2, 4, 6, rng.integers(2, 3)], [0, 2, 1, 2])
    refuses(run, probes.refused, "schedule_interleaved", (rng.integers(1, 3),), also)


@exercise(INTERLEAVED, kind="property")
def test_more_chunks_make_the_bubble_smaller(run, rng):
    for case, ranks in judged(run, [*draw_cases(rng, chunks=2), [*draw_cases(rng, count=1)[-1], 1]]):
        have = before_the_first_backward(ranks)
        alike = ", on all ranks alike" if len(set(have)) == 1 and len(have) > 1 else ""
        holds_the_bubble(
            ranks, case,
            f"by rank, {have} forwards come before the first backward{alike}: go round in groups of p micro-batches, "
            "and warm up for a round for each further chunk, and longer on earlier ranks",
        )  # fmt: skip


@exercise(INTERLEAVED, kind="property")
def test_activations_do_not_grow_with_micro_batches(run, rng):
    p, v = rng.integers(2, 4), rng.integers(2, 3)
    for case, ranks in judged(run, [*draw_cases(rng, chunks=2), [p, 4 * p, v], [p, 4 * p, 1]]):
        simulation = played(ranks, case[1], case[2], what=title(case))
        for rank, live in enumerate(simulation.live):
            most = min(case[1] * case[2], most_alive(rank, case[0], case[2]))
            assert live <= most, (
                f"{title(case)}, rank {rank}: keeps {live} activations of a chunk at once, expected at most {most}: "
                f"warm up no longer than until the first backward can come\n{drawn(simulation)}"
            )


@exercise(INTERLEAVED, kind="property")
def test_micro_batches_go_round_in_groups(run, rng):
    for case, ranks in judged(run, draw_cases(rng, chunks=2)):
        p, m, v = case
        want = [[i, c] for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
        for rank, actions in enumerate(ranks):
            forward = [[i, c] for kind, i, c in actions if kind == "forward"]
            place = next((n for n, (x, y) in enumerate(zip(forward, want, strict=False)) if x != y), None)
            assert place is None, (
                f"{title(case)}, rank {rank}: forward {place} is of micro-batch {forward[place][0]}, chunk "
                f"{forward[place][1]}, expected {want[place][0]}, chunk {want[place][1]}: p micro-batches through a "
                "chunk, then the same through the next"
            )
