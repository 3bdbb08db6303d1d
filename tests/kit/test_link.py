"""Messages on a link take at least the time of the formula, and all operations of Gloo run on it.

The switch's clock gives the times. The tests assert lower bounds, which hold on busy cores too. tests/ddp and
tests/zero time the overlap of messages with work.
"""

import itertools

import pytest

from lab.cluster.costs import Link, ring_cost, sent_bytes
from lab.course.assignment import ROOT
from lab.harness.trace import Trace
from lab.ranks.ledger import Row

from . import probes, probes_link
from .probes_backend import CASES, WORLD, cases, wire_value
from .test_backend import equal, inputs

IMPL = ROOT / "reference"
SLOW = Link(alpha_s=2e-3, bytes_per_s=1e6)
CLOCK_S = 1e-6  # tolerance for rounding in sums of seconds


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
def test_operation_costs_and_bytes_match_formulas(op, bytes, cost_ms, sent):
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
def test_invalid_inputs_are_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"link": SLOW}, {"link": (1e-3, 1e6), "world": 2}, {"link": 1e-3, "world": 2}])
def test_runner_refuses_invalid_link_option(runner, options):
    with pytest.raises(ValueError, match="link: expected"):
        runner.run(probes.rank_and_world, **options)


@pytest.mark.parametrize("name", CASES)
def test_link_delivers_right_data_no_sooner_than_its_cost(runner, name):
    traces = runner.trace(cases, [name], ["float32"], world=WORLD, link=SLOW)
    for rank, got in enumerate(traces):
        want = wire_value(CASES[name][1](inputs("float32"), rank))
        assert equal(got.values[f"{name}, float32"], want), f"{name}, rank {rank}"
    check_nothing_is_sooner(traces, SLOW)


def check_nothing_is_sooner(traces: list[Trace], link: Link) -> None:
    """Assert that each operation starts at the same time on all its ranks, after all have issued it. Operations run one
    after the other, and take at least their cost."""
    starts = [[row.started_s for row in trace.messages if row.op != "recv"] for trace in traces]
    for trace in traces:
        for row in trace.messages:
            others = {"send": [], "recv": [row.peer]}.get(row.op, row.group)
            assert all(row.started_s in starts[other] for other in others), (
                f"{row}: began otherwise on {others}: {starts}"
            )
            assert row.op == "recv" or row.started_s >= row.issued_s, f"{row}: began before it was issued"
            assert row.done_s >= row.started_s + cost_s(row, link) - CLOCK_S, f"{row}: was sooner than it costs"
        sent = sorted((row.started_s, cost_s(row, link)) for row in trace.messages if row.op != "recv")
        for (start, cost), (following, _) in itertools.pairwise(sent):
            assert following >= start + cost - CLOCK_S, f"rank {trace.messages[0].rank} sends two at a time: {sent}"


def cost_s(row: Row, link: Link) -> float:
    return link.cost_s(row.op, row.bytes, len(row.group))


def test_link_serializes_sends_and_starts_collectives_together(runner):
    check_nothing_is_sooner(runner.trace(probes_link.burst, 6, 250, world=4, link=SLOW), SLOW)


def test_operations_in_crossed_order_complete_on_a_link(runner):
    assert runner.run(probes_link.crossed, world=2, link=SLOW) == [[2.0, 2.0, 1.0]] * 2
