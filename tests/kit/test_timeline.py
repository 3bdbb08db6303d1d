"""Timelines: plot, description and table show what the ranks did."""

import math
import random

import pytest

from lab.plots.timeline import Span, hidden, timeline, timelines


def two_ranks() -> list[list[Span]]:
    """Rank 0 hides 2 of 3 ms of messages behind compute, rank 1 none of 2 ms."""
    first = [
        Span("forward", "forward", 0.000, 0.004), Span("backward", "backward", 0.004, 0.010),
        Span("message", "all_reduce #0", 0.008, 0.0095, 1 << 20),
        Span("message", "all_reduce #1", 0.009, 0.011, 1 << 20), Span("step", "optimizer", 0.011, 0.012),
    ]  # fmt: skip
    second = [
        Span("forward", "forward", 0.000, 0.005), Span("message", "all_reduce #0", 0.005, 0.007, 3 << 10),
        Span("step", "optimizer", 0.007, 0.008),
    ]  # fmt: skip
    return [first, second]


# ---- spans ----


@pytest.mark.parametrize(
    "wrong", [("sleep", 0.0, 1.0), ("step", 1.0, 0.0), ("step", 0.0, math.inf), ("step", math.nan, 1.0)]
)
def test_a_span_that_is_none_is_refused(wrong):
    kind, start_s, end_s = wrong
    with pytest.raises(ValueError, match="expected a kind among forward, backward, step, message"):
        Span(kind, "x", start_s, end_s)


def test_what_is_hidden_of_many_is_that_of_every_moment():
    draw = random.Random(0)
    for _ in range(50):
        starts = [draw.randrange(40) for _ in range(draw.randrange(12))]
        rank = [Span(draw.choice(["message", "forward"]), "", s / 8, (s + draw.randrange(1, 16)) / 8) for s in starts]
        moments = [{span.kind for span in rank if span.start_s <= tick / 8 < span.end_s} for tick in range(60)]
        messages, alone = sum("message" in m for m in moments) / 8, sum(m == {"message"} for m in moments) / 8
        assert hidden(rank) == (messages, alone)
    assert hidden([]) == (0, 0)


# ---- the picture ----


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_the_picture_says_in_words_and_numbers_what_it_shows(pyplot):
    _, axes = pyplot.subplots(figsize=(8, 3), dpi=100)
    picture = timeline(axes, two_ranks(), "bucketed")
    assert "bucketed: 2 ranks, a row each" in picture.alt
    assert "until 12.0 ms" in picture.alt
    assert "with no compute above them for at most 2.0 ms, on rank 1" in picture.alt
    head, _, first, second = picture.table.splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    assert first == "| 0 | 4.0 | 6.0 | 1.0 | 3.0 | 1.0 | 2 | 2 MiB |"
    assert second == "| 1 | 5.0 | 0.0 | 1.0 | 2.0 | 2.0 | 1 | 3 KiB |"
    handles = axes.get_legend().legend_handles
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "step", "message"]
    assert len({h.get_hatch() for h in handles}) == len({h.get_facecolor() for h in handles}) == 4, "no colour alone"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0", "rank 1"]


def test_hundreds_of_messages_stay_a_few_shapes(pyplot):
    """400 messages, 50 µs each with 1 µs between: one bar a rank, and no more ticks than there is room for."""
    rank = [Span("message", f"send #{i}", 51e-6 * i, 51e-6 * i + 50e-6, 1) for i in range(400)]
    figure, pictures = timelines({"naive": [rank] * 16, "flat": [rank[:1]] * 16})
    assert list(pictures) == ["naive", "flat"]
    axes = figure.axes[0]
    bars = [c for c in axes.collections if c.get_hatch() and len(c.get_paths())]
    assert [len(b.get_paths()) for b in bars] == [1] * 16
    ticks = max(len(c.get_segments()) for c in axes.collections if hasattr(c, "get_segments") and not c.get_hatch())
    assert 50 < ticks < figure.get_size_inches()[0] * 100 / 4
    assert figure.get_size_inches()[1] <= 12
    figure.canvas.draw()
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim(), "panels share the axis of time"
