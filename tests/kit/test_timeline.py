"""The plot of a timeline shows the ranks' work."""

import pytest

from lab.plots.timeline import Span, timelines


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_timeline_has_row_per_rank_and_style_per_kind(pyplot):
    kinds = ["forward", "backward", "step", "message"]
    rank = [Span(kind, kind, 0.003 * i, 0.003 * (i + 1)) for i, kind in enumerate(kinds)]
    figure = timelines({"bucketed": [rank, rank[1:]]})
    assert [axes.get_title() for axes in figure.axes] == ["bucketed: 12.0 ms"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == kinds
    handles = legend.legend_handles
    assert len({h.get_hatch() for h in handles}) == len({h.get_facecolor() for h in handles}) == 4, "no colour alone"
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_hundreds_of_messages_stay_a_few_shapes(pyplot):
    """400 messages of 50 µs, 1 µs apart, become one bar per rank, and ticks fit on the axis."""
    rank = [Span("message", f"send #{i}", 51e-6 * i, 51e-6 * i + 50e-6) for i in range(400)]
    figure = timelines({"naive": [rank] * 16, "flat": [rank[:1]] * 16})
    axes = figure.axes[0]
    bars = [c for c in axes.collections if c.get_hatch() and len(c.get_paths())]
    assert [len(b.get_paths()) for b in bars] == [1] * 16
    ticks = max(len(c.get_segments()) for c in axes.collections if hasattr(c, "get_segments") and not c.get_hatch())
    assert 50 < ticks < figure.get_size_inches()[0] * 100 / 4
    assert figure.get_size_inches()[1] <= 12
    figure.canvas.draw()
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim(), "panels share the axis of time"
