"""Messages on a link: what they cost by the formula, that none is done sooner, and that all of Gloo runs on it.

The switch's clock gives the times. The tests assert lower bounds, which no busy core can break. That work hides
messages is timed in tests/ddp and tests/zero.
"""

import itertools

import pytest

from lab.cluster.costs import Link, ring_cost, sent_bytes
from lab.course.assignment import ROOT
from lab.harness.trace import Trace

from . import probes, probes_link
from .probes_backend import CASES, WORLD, cases, crossing
from .test_backend import inputs, same

IMPL = ROOT / "reference"
SLOW = Link(alpha_s=2e-3, bytes_per_s=1e6)
CLOCK_S = 1e-6  # what adding floats of this size may lose


@pytest.mark.parametrize(
    ("op", "bytes", "cost_ms", "sent"),
    [
        ("all_reduce", 1e6, 21, 1.5e6),
        ("reduce_scatter", 0.25e6, 10.5, 0.75e6),
        ("all_gather", 0.25e6, 10.5, 0.75e6),
        ("all_to_all", 1e6, 10.5, 0.75e6),
        ("broadcast", 1e6, 22, 2e6),
        ("reduce", 1e6, 22, 1e6),
        ("scatter", 1e6, 33, 3e6),
        ("gather", 1e6, 33, 1e6),
        ("send", 1e6, 11, 1e6),
        ("recv", 1e6, 11, 0),
        ("barrier", 0, 2, 0),
    ],
)
def test_costs_are_those_of_the_formulas(op, bytes, cost_ms, sent):
    assert ring_cost(op, bytes, 4, 1e-3, 1 / 100e6) == pytest.approx(cost_ms / 1e3)
    assert Link(1e-3, 100e6).cost_s(op, bytes, 4) == pytest.approx(cost_ms / 1e3)
    assert sent_bytes(op, bytes, 4) == sent
    if op not in ("send", "recv"):
        assert ring_cost(op, bytes, 1, 1e-3, 1e-8) == sent_bytes(op, bytes, 1) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Link(-1e-3, 1e6), "alpha_s: expected"),
        (lambda: Link(0, 0), "bytes_per_s: expected"),
        (lambda: Link(0, "1 Gbit/s"), "bytes_per_s: expected"),
        (lambda: ring_cost("allreduce", 8, 2, 0, 0), "expected an op among all_reduce"),
        (lambda: ring_cost("all_reduce", 8, 0, 0, 0), "world >= 1"),
        (lambda: sent_bytes("all_reduce", -8, 2), "bytes >= 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"link": SLOW}, {"link": (1e-3, 1e6), "world": 2}, {"link": 1e-3, "world": 2}])
def test_a_link_is_a_link_and_joins_ranks(runner, options):
    with pytest.raises(ValueError, match="link: expected"):
        runner.run(probes.who, **options)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_moves_its_data_and_none_is_sooner_than_it_costs(runner, name):
    linked = runner.trace(cases, [name], ["float32"], world=WORLD, link=SLOW)
    for rank, got in enumerate(linked):
        want = crossing(CASES[name][1](inputs("float32"), rank))
        assert same(got.values[f"{name}, float32"], want), f"{name}, rank {rank}"
    nothing_is_sooner(rows_of(linked), SLOW)


def rows_of(traces: list[Trace]) -> list[list[dict]]:
    return [[row.plain() for row in trace.messages] for trace in traces]


def nothing_is_sooner(ranks: list[list[dict]], link: Link) -> None:
    """Assert that the operations of each rank's rows took at least their cost, one after the other."""
    for rows in ranks:
        for row in rows:
            said = f"rank {row['rank']}, {row['op']} #{row['number']}: {row}"
            assert row["started_s"] >= 0, said
            cost = link.cost_s(row["op"], row["bytes"], len(row["group"]))
            assert row["done_s"] >= row["started_s"] + cost - CLOCK_S, said
            begun = [other["issued_s"] for other in counterparts(row, rows, ranks)]
            assert row["started_s"] >= max(begun), f"{said} began before all had issued it"
            assert row["done_s"] >= max(begun) + cost - CLOCK_S, said
        busy = sorted(
            (r["started_s"], link.cost_s(r["op"], r["bytes"], len(r["group"]))) for r in rows if r["op"] != "recv"
        )
        for (start, cost), (following, _) in itertools.pairwise(busy):
            assert following >= start + cost - CLOCK_S, f"rank {rows[0]['rank']} sends two at a time: {busy}"


def counterparts(row: dict, rows: list[dict], ranks: list[list[dict]]) -> list[dict]:
    """The rows that must be issued before an operation can start: its own, its collective's, or a recv's send."""
    if row["op"] == "send":
        return [row]
    if row["op"] == "recv":
        mine = [r for r in rows if (r["op"], r["peer"], r["tag"]) == ("recv", row["peer"], row["tag"])]
        sends = [r for r in ranks[row["peer"]] if (r["op"], r["peer"], r["tag"]) == ("send", row["rank"], row["tag"])]
        return [sends[mine.index(row)]]
    place = [r for r in rows if r["group"] == row["group"] and r["op"] not in ("send", "recv")].index(row)
    return [
        [r for r in ranks[member] if r["group"] == row["group"] and r["op"] not in ("send", "recv")][place]
        for member in row["group"]
    ]


def test_a_rank_sends_one_message_after_the_other_and_a_collective_begins_on_all_its_ranks_at_once(runner):
    ranks = rows_of(runner.trace(probes_link.burst, 6, 250, world=4, link=SLOW))
    nothing_is_sooner(ranks, SLOW)
    for members in ([0, 1, 2, 3], [0, 1], [2, 3]):
        starts = [
            [r["started_s"] for r in ranks[m] if r["group"] == members and r["op"] == "all_reduce"] for m in members
        ]
        assert len(starts[0]) == 6
        assert all(s == starts[0] for s in starts)


def test_what_gets_through_on_gloo_gets_through_on_a_link(runner):
    assert runner.run(probes_link.crossed, world=2, link=SLOW) == [[2.0, 2.0, 1.0]] * 2
