"""Timelines: what is drawn, said and traced is what the ranks did."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import defaultdict

import pytest

from lab.course.assignment import ROOT
from lab.harness.runner import Executor, Runner
from lab.plots.timeline import Span, hidden, spans, timeline, timelines, trace
from tests.ddp import probes_timeline


def row(number: int, issued_s: float, done_s: float, **more) -> dict:
    return {
        "number": number, "op": "all_reduce", "bytes": 1 << 20, "elements": 1 << 18, "dtype": "float32",
        "group": [0, 1], "phase": "backward", "issued_s": issued_s, "waited_s": -1.0, "done_s": done_s, "peer": -1,
        **more,
    }  # fmt: skip


def two_ranks() -> list[list[Span]]:
    """Rank 0 hides 2 of 3 ms of messages, rank 1 none of 2 ms."""
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


def test_ranks_share_one_clock_that_starts_with_the_first():
    rows = [[row(0, 100.5, 100.75), row(1, 100.6, -1.0)], [row(0, 100.25, 100.75, phase="")]]
    compute = [[Span("forward", "forward", 100.0, 100.5)], [Span("forward", "forward", 100.125, 100.25)]]
    first, second = spans(rows, compute)
    assert [(s.kind, s.start_s, s.end_s) for s in first[:2]] == [("forward", 0, 0.5), ("message", 0.5, 0.75)]
    assert [(s.kind, s.start_s, s.end_s) for s in second] == [("forward", 0.125, 0.25), ("message", 0.25, 0.75)]
    assert [s.name for s in (first[1], second[1])] == ["all_reduce #0, backward", "all_reduce #0"]
    assert first[1].bytes == 1 << 20
    assert first[2].start_s == first[2].end_s, "nobody waited for it: no known end"
    assert spans([[], [row(0, 7.0, 8.0)]])[1][0].start_s == 0
    assert spans([[], []]) == [[], []]


def test_on_a_link_a_message_lasts_from_when_the_link_began_with_it():
    ((waiting, sent),) = spans([[row(0, 1.0, 3.0, started_s=1.0), row(1, 1.5, 4.0, started_s=3.0)]])
    assert (waiting.start_s, waiting.end_s, sent.start_s, sent.end_s) == (0, 2, 2, 3)
    ((without,),) = spans([[row(0, 1.0, 3.0, started_s=-1.0)]])
    assert without.end_s == 2


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


def test_what_is_hidden_behind_compute():
    first, second = two_ranks()
    assert hidden(first) == pytest.approx((0.003, 0.001))
    assert hidden(second) == pytest.approx((0.002, 0.002))
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


def test_no_kind_is_told_by_colour_alone(pyplot):
    _, axes = pyplot.subplots(figsize=(8, 3), dpi=100)
    timeline(axes, two_ranks(), "bucketed")
    handles = axes.get_legend().legend_handles
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "step", "message"]
    assert len({h.get_hatch() for h in handles}) == len({h.get_facecolor() for h in handles}) == 4
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("world", [1, 2, 16])
def test_hundreds_of_messages_stay_a_few_shapes(pyplot, world):
    """400 messages, 50 µs each with 1 µs between: one bar a rank, and no more ticks than there is room for."""
    rank = [Span("message", f"send #{i}", 51e-6 * i, 51e-6 * i + 50e-6, 1) for i in range(400)]
    figure, pictures = timelines({"naive": [rank] * world, "flat": [rank[:1]] * world})
    assert list(pictures) == ["naive", "flat"]
    axes = figure.axes[0]
    bars = [c for c in axes.collections if c.get_hatch() and len(c.get_paths())]
    assert [len(b.get_paths()) for b in bars] == [1] * world
    ticks = max(len(c.get_segments()) for c in axes.collections if hasattr(c, "get_segments") and not c.get_hatch())
    assert 50 < ticks < figure.get_size_inches()[0] * 100 / 4
    assert figure.get_size_inches()[1] <= 12
    figure.canvas.draw()
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim(), "panels share the axis of time"


def test_nothing_can_be_drawn_too(pyplot):
    _, axes = pyplot.subplots()
    assert "0 ranks" in timeline(axes, [], "nothing").alt
    assert "1 rank," in timeline(axes, [[]], "nothing").alt
    timelines({"nothing": [[]], "a moment": [[Span("step", "s", 0, 0)]]})


# ---- the trace ----


def check_trace(made: dict) -> dict[tuple[int, int], list[dict]]:
    """Hold a trace against the format's rules; its complete events by (pid, tid)."""
    assert set(made) == {"traceEvents", "displayTimeUnit"}
    assert made["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[dict]] = defaultdict(list)
    named = set()
    for e in made["traceEvents"]:
        assert isinstance(e["name"], str)
        assert type(e["pid"]) is int
        assert type(e["tid"]) is int
        assert e["pid"] > 0, "Perfetto takes process 0 for the idle one"
        if e["ph"] == "M":
            assert set(e) == {"ph", "name", "pid", "tid", "args"}
            known = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
            assert set(e["args"]) == {known[e["name"]]}
            named.add((e["name"], e["pid"], e["tid"] if e["name"] == "thread_name" else 0))
        else:
            assert e["ph"] == "X"
            assert set(e) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
            assert 0 <= e["ts"] < math.inf
            assert 0 <= e["dur"] < math.inf
            assert set(e["args"]) == {"bytes"}
            threads[e["pid"], e["tid"]].append(e)
    for pid, tid in threads:
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
    assert len({tid for _, tid in threads}) == len(threads), "a thread's number is its own"
    for events in threads.values():
        for before, after in itertools.pairwise(events):
            ends_ns = round(1e3 * before["ts"]) + round(1e3 * before["dur"])
            assert ends_ns <= round(1e3 * after["ts"]), "events of one thread overlap"
    return threads


def names(made: dict, kind: str) -> list[str]:
    return [e["args"]["name"] for e in made["traceEvents"] if e["name"] == kind]


def test_the_trace_is_one_that_perfetto_reads(tmp_path):
    made = trace(two_ranks(), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == made
    threads = check_trace(made)
    assert names(made, "process_name") == ["rank 0", "rank 1"]
    assert names(made, "thread_name") == ["compute", "messages", "messages 2", "compute", "messages"]
    events = [e for mine in threads.values() for e in mine]
    assert len(events) == sum(map(len, two_ranks()))
    (second,) = [e for e in events if e["name"] == "all_reduce #1"]
    assert (second["ts"], second["dur"]) == pytest.approx((9000, 2000))
    assert (second["cat"], second["args"]) == ("message", {"bytes": 1 << 20})
    check_trace(trace([[], []]))


# ---- a real step ----


def test_a_training_step_of_two_ranks(pyplot):
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "hidden": 64, "vocabulary": 64, "context": 16}
    runner = Runner(Executor(ROOT / "reference"))
    try:
        asked = (("naive", {}), ("overlapped", {}), ("bucketed", {"bucket_bytes": 1 << 14}))
        got = {kind: runner.run(probes_timeline.step, kind, sizes, 2, more, world=2) for kind, more in asked}
    finally:
        runner.close()
    panels = {
        k: spans([g["rows"] for g in of], [[Span(*s) for s in g["compute"]] for g in of]) for k, of in got.items()
    }
    _, pictures = timelines(panels)
    for kind, ranks in panels.items():
        check_trace(trace(ranks))
        assert "2 ranks" in pictures[kind].alt
        for rank in ranks:
            assert [s.kind for s in rank if s.kind != "message"] == ["forward", "backward", "step"]
            assert min(s.start_s for s in rank) >= 0
    (backward,) = [s for s in panels["naive"][0] if s.kind == "backward"]
    assert all(s.start_s >= backward.end_s for s in panels["naive"][0] if s.kind == "message")
    (backward,) = [s for s in panels["overlapped"][0] if s.kind == "backward"]
    assert any(s.start_s < backward.end_s for s in panels["overlapped"][0] if s.kind == "message")
