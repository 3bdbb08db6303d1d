"""Schedules: the checker's clock is right, its errors name the missing action, and the plot shows the schedule."""

import pytest

from lab.cluster.schedule import Action, ScheduleError, check, drawn


def line(text: str) -> list[Action]:
    """Parse actions in short form, such as "F0 F1.1 B0"."""
    kinds = {"F": "forward", "B": "backward"}
    return [Action(kinds[w[0]], *map(int, w[1:].split("."))) for w in text.split()]


def test_schedule_times_and_drawing_match_a_hand_example():
    schedule = [line("F0 F1 B0 B1"), line("F0 B0 F1 B1")]
    outcome = check(schedule, 2)
    assert outcome.starts == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert outcome.ends == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert (outcome.length, outcome.busy, outcome.bubble, outcome.live) == (9, 6, 0.5, [2, 1])
    slow = check(schedule, 2, forward=2, backward=2)
    assert (slow.length, slow.bubble) == (12, 0.5)
    assert drawn(outcome) == "rank 0  F0 F1 ·  ·  B0 B0 ·  B1 B1\nrank 1  ·  F0 B0 B0 F1 B1 B1 ·  ·"
    assert all(len(row) == 20 and row.endswith(" …") for row in drawn(outcome, 20).splitlines())
    chunked = check([line("F0 F0.1 B0.1 B0")], 1, 2)
    assert drawn(chunked).split() == ["rank", "0", "F0", "F0'", "B0'", "B0'", "B0", "B0"]


@pytest.mark.parametrize(
    ("ranks", "chunks", "says"),
    [
        (["F0 B0 F1"], 1, "rank 0: backward of micro-batch 1 is missing"),
        (["F0 B0 F1 B1", "F0 F1 B1 B0 F1"], 1, "rank 1, action 4: forward of micro-batch 1 for the second time"),
        (["B0 F0 F1 B1"], 1, "rank 0, action 0: backward of micro-batch 0 before its forward"),
        (
            ["F0 F2 B2 B0"], 1,
            "rank 0, action 1: forward of micro-batch 2: expected micro-batches 0 to 1, chunks 0 to 0",
        ),
        (["F0 F1 B0 B1"], 2, "rank 0: forward of micro-batch 0, chunk 1 is missing"),
        (
            ["F0 B0 F1 B1", "F1 B1 F0 B0"], 1,
            "deadlock: rank 0 cannot begin backward of micro-batch 0 before rank 1 has ended backward of micro-batch "
            "0; rank 1 cannot begin forward of micro-batch 1 before rank 0 has ended forward of micro-batch 1",
        ),
        ([], 1, "expected a list of actions for each rank, got none"),
    ],
)  # fmt: skip
def test_invalid_schedule_error_names_the_fault(ranks, chunks, says):
    with pytest.raises(ScheduleError) as error:
        check([line(text) for text in ranks], 2, chunks)
    assert str(error.value) == says
