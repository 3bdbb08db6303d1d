"""Schedules: the checker's clock is right, it says what is missing, and the picture shows what it played."""

from __future__ import annotations

import pytest

from lab.cluster.schedule import Action, ScheduleError, check, drawn
from lab.plots.schedule import schedule
from tests.mesh.schedules import gpipe, most_alive, one_forward_one_backward


def actions(ranks: list) -> list[list[Action]]:
    return [[Action(*a) for a in rank] for rank in ranks]


def line(text: str) -> list[Action]:
    """ "F0 F1.1 B0" in short."""
    kinds = {"F": "forward", "B": "backward"}
    return [Action(kinds[w[0]], *map(int, w[1:].split("."))) for w in text.split()]


def test_a_schedule_played_by_hand_and_drawn_in_text():
    by_hand = [line("F0 F1 B0 B1"), line("F0 B0 F1 B1")]
    played = check(by_hand, 2)
    assert played.starts == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert played.ends == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert (played.length, played.busy, played.bubble, played.live) == (9, 6, 0.5, [2, 1])
    slow = check(by_hand, 2, forward=2, backward=2)
    assert (slow.length, slow.bubble) == (12, 0.5)
    assert drawn(played) == "rank 0  F0 F1 ·  ·  B0 B0 ·  B1 B1\nrank 1  ·  F0 B0 B0 F1 B1 B1 ·  ·"
    assert all(len(row) == 20 and row.endswith(" …") for row in drawn(played, 20).splitlines())
    two = check(actions(one_forward_one_backward(1, 1, 2)), 1, 2)
    assert drawn(two).split() == ["rank", "0", "F0", "F0'", "B0'", "B0'", "B0", "B0"]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_formulas_of_the_papers(stages, chunks):
    for micro_batches in (stages, 2 * stages, 4 * stages):
        want = (stages - 1) / (chunks * micro_batches)
        played = check(actions(one_forward_one_backward(stages, micro_batches, chunks)), micro_batches, chunks)
        assert played.bubble == pytest.approx(want)
        assert played.live == [min(micro_batches * chunks, most_alive(r, stages, chunks)) for r in range(stages)]
        everything = check(actions(gpipe(stages, micro_batches, chunks)), micro_batches, chunks)
        assert everything.bubble == pytest.approx(want)
        assert everything.live == [micro_batches * chunks] * stages


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
def test_what_is_no_schedule_is_told_in_one_line(ranks, chunks, says):
    with pytest.raises(ScheduleError) as error:
        check([line(text) for text in ranks], 2, chunks)
    assert str(error.value) == says


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expected an action's kind among forward, backward, got 'Forward'"):
        Action("Forward", 0)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_picture_shows_what_was_played(chunks):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    played = check(actions(one_forward_one_backward(2, 4, chunks)), 4, chunks)
    picture = schedule(axes, played, "1F1B")
    assert len(axes.patches) == sum(map(len, played.ranks))
    assert sorted(t.get_text() for t in axes.texts) == sorted(str(a.micro_batch) for r in played.ranks for a in r)
    looks = {(p.get_facecolor(), p.get_hatch()) for p in axes.patches}
    assert len({c for c, _ in looks}) == len({h for _, h in looks}) == min(2 * chunks, 4), "never colour alone"
    assert "2 ranks, a row each, and 4 micro-batches" in picture.alt
    head, _, first, second = picture.table.splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    assert first.startswith("| 0 | F0 F1 B0 " if chunks == 1 else "| 0 | F0.0 F1.0 F0.1")
    figure.canvas.draw()
    pyplot.close(figure)
