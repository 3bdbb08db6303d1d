"""1F1B: the bubble of GPipe with fewer activations, at most p − r on rank r.

Must hold: each rank lists every action once and in order, and all ranks together run to the end. Idle over busy time is
(p − 1)/m. Rank r keeps at most min(m, p − r) activations. Backwards come in the order of forwards.
Typical fakes: GPipe under another name (its activations grow with m); no warm-up, so that one forward and its backward
alternate (the bubble is p − 1); a warm-up of p on every rank (the right bubble, too many activations).
"""

from lab.harness.pytest_plugin import exercise

from . import schedules

ONE = "mesh.schedule_1f1b"


@exercise(ONE, kind="numerics")
def test_every_action_occurs_once_without_deadlock(run, rng):
    schedules.check_all(run, ONE, schedules.draw_cases(rng))


@exercise(ONE, kind="numerics")
def test_invalid_pipeline_arguments_are_refused(run):
    schedules.check_refused(run, ONE)


@exercise(ONE, kind="numerics")
def test_micro_batches_run_in_order_in_both_directions(run, rng):
    for case, ranks in schedules.listed(run, ONE, schedules.draw_cases(rng)):
        for rank, actions in enumerate(ranks):
            for kind in ("forward", "backward"):
                order = [i for k, i, _ in actions if k == kind]
                assert order == list(range(case[1])), (
                    f"{schedules.title(case)}, rank {rank}: micro-batches go {kind} as {order}, expected 0, 1, …"
                )


@exercise(ONE, kind="property")
def test_bubble_equals_gpipes_and_live_activations_are_bounded(run, rng):
    """One test checks both: GPipe alone has the idle time, and a pipeline without warm-up has the activations."""
    for case, ranks in schedules.listed(run, ONE, schedules.draw_cases(rng)):
        warm_up = "min(m, p − r) forwards come before rank r's first backward, then a backward and a forward alternate"
        schedules.check_bubble(ranks, case, warm_up)
        schedules.check_alive(ranks, case, "activations", warm_up)
