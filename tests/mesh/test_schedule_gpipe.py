"""GPipe: all forwards, then all backwards.

Must hold: each rank lists every action once and in order, and all ranks together run to the end. Idle over busy time is
(p − 1)/m. No backward comes before the last forward.
Typical fakes: 1F1B, which has the same bubble (its first backward comes too early); backwards in a different order per
rank (the bubble grows, or ranks deadlock); micro-batches one after the other (the bubble is p − 1).
"""

from lab.harness.pytest_plugin import exercise

from .schedules import check_all, check_bubble, check_refused, draw_cases, listed, title

GPIPE = "mesh.schedule_gpipe"


@exercise(GPIPE, kind="numerics")
def test_every_action_occurs_once_without_deadlock(run, rng):
    check_all(run, GPIPE, draw_cases(rng))


@exercise(GPIPE, kind="numerics")
def test_invalid_pipeline_arguments_are_refused(run):
    check_refused(run, GPIPE)


@exercise(GPIPE, kind="property")
def test_idle_time_is_that_of_filling_and_emptying_once(run, rng):
    for case, ranks in listed(run, GPIPE, draw_cases(rng)):
        check_bubble(ranks, case, "all forwards, then all backwards, both in the same order on all ranks")


@exercise(GPIPE, kind="property")
def test_everything_goes_forward_before_anything_goes_back(run, rng):
    for case, ranks in listed(run, GPIPE, draw_cases(rng)):
        for rank, actions in enumerate(ranks):
            kinds = [kind for kind, _, _ in actions]
            early = kinds.index("backward")
            assert early == case[1], (
                f"{title(case)}, rank {rank}: the first backward is action {early}, expected {case[1]}: in GPipe all "
                "forwards come first, so activations of all micro-batches are alive"
            )
            order = [i for kind, i, _ in actions if kind == "forward"]
            assert order == list(range(case[1])), f"{title(case)}, rank {rank}: micro-batches go forward as {order}"
