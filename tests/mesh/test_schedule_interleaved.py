"""Interleaved 1F1B: v chunks per rank, and a bubble v times smaller.

Must hold: each rank lists every action of each of its chunks once, and all ranks together run to the end. Idle over
busy time is (p − 1)/(v·m). Rank r keeps at most 2(p − 1 − r) + (v − 1)p + 1 activations of a chunk.
Typical fakes: 1F1B of one chunk after the other (the bubble stays (p − 1)/m or grows); all forwards first (the right
bubble, but all v·m activations); the short warm-up of 1F1B (ranks wait for backwards that come later, or deadlock).
"""

from lab.harness.pytest_plugin import exercise

from . import schedules

INTERLEAVED = "mesh.schedule_interleaved"


@exercise(INTERLEAVED, kind="numerics")
def test_every_action_occurs_once_without_deadlock(run, rng):
    schedules.check_all(run, INTERLEAVED, schedules.draw_cases(rng, chunks=2))


@exercise(INTERLEAVED, kind="numerics")
def test_with_one_chunk_any_number_of_micro_batches_will_do(run, rng):
    schedules.check_all(run, INTERLEAVED, [[*case, 1] for case in schedules.draw_cases(rng)])


@exercise(INTERLEAVED, kind="numerics")
def test_invalid_pipeline_arguments_are_refused(run, rng):
    invalid = ([0, 2, 4, 0], [1, 2, 2, -1], [0, 3, 4, 2], [2, 4, 6, rng.integers(2, 3)], [0, 2, 1, 2])
    schedules.check_refused(run, INTERLEAVED, (rng.integers(1, 3),), invalid)


@exercise(INTERLEAVED, kind="property")
def test_more_chunks_make_the_bubble_smaller(run, rng):
    cases = [*schedules.draw_cases(rng, chunks=2), [*schedules.draw_cases(rng, count=1)[-1], 1]]
    for case, ranks in schedules.listed(run, INTERLEAVED, cases):
        schedules.check_bubble(
            ranks, case,
            "go round in groups of p micro-batches, and warm up for a round for each further chunk, longer on earlier "
            "ranks",
        )  # fmt: skip


@exercise(INTERLEAVED, kind="property")
def test_activations_do_not_grow_with_micro_batches(run, rng):
    p, v = rng.integers(2, 4), rng.integers(2, 3)
    cases, cause = schedules.draw_cases(rng, chunks=2), "warm up no longer than until the first backward can come"
    for case, ranks in schedules.listed(run, INTERLEAVED, [*cases, [p, 4 * p, v], [p, 4 * p, 1]]):
        schedules.check_alive(ranks, case, "activations of a chunk", cause)


@exercise(INTERLEAVED, kind="property")
def test_micro_batches_go_round_in_groups(run, rng):
    for case, ranks in schedules.listed(run, INTERLEAVED, schedules.draw_cases(rng, chunks=2)):
        p, m, v = case
        want = [[i, c] for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
        for rank, actions in enumerate(ranks):
            for phase, wanted in (("forward", want), ("backward", [[i, v - 1 - c] for i, c in want])):
                got = [[i, c] for kind, i, c in actions if kind == phase]
                index = next((n for n, (x, y) in enumerate(zip(got, wanted, strict=False)) if x != y), None)
                assert index is None, (
                    f"{schedules.title(case)}, rank {rank}: {phase} {index} is of micro-batch {got[index][0]}, chunk "
                    f"{got[index][1]}, expected {wanted[index][0]}, chunk {wanted[index][1]}: p micro-batches through "
                    "a chunk, then the same through the next, backward from the last chunk to the first"
                )
