"""An all-to-all with a backward pass.

Must hold: rows arrive ordered by rank, in any numbers, and gradients return, each by one all-to-all.
Typical fakes: equal splits; splits not swapped in backward; a plain all_to_all_single, through which no gradient flows;
all rows sent to all ranks; a rank that skips the call because it has nothing to send.
"""

import math

import pytest
import torch

from lab.harness import layouts
from lab.harness.diagnose import row_order
from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_experts as probes
from .carried import BOTH
from .experts import each_case, in_group

EXCHANGE = "mesh.exchange"
KINDS = ["uneven", "empty", "from one", "nothing", "integers", "half", "three dims"]


def draw(rng, world: int) -> list:
    """Draw cases[rank][kind]: rows from each rank to each."""
    cases: list = [[] for _ in range(world)]
    for kind in KINDS:
        n = [[rng.integers(0, 3) if kind != "empty" else rng.choice([0, 0, 3]) for _ in range(world)]
             for _ in range(world)]  # fmt: skip
        if kind in ("from one", "nothing"):
            sender = rng.integers(0, world - 1) if kind == "from one" else -1
            n = [[count + 1 if source == sender else 0 for count in counts] for source, counts in enumerate(n)]
        width = [2, rng.integers(1, 3)] if kind == "three dims" else [rng.integers(1, 4)]
        dtype = torch.float16 if kind == "half" else torch.float32
        for r in range(world):
            rows = rng.normal(sum(n[r]), *width).to(dtype)
            received = [n[s][r] for s in range(world)]
            weights = rng.normal(sum(received), *width).to(dtype)
            if kind == "integers":
                rows = (rows * 100).long()
            drawn = {"weights": weights, "rows": rows}
            operands, layout = rng.choice([layouts.draw(rng, **drawn), rng.choice(layouts.every(rng, **drawn))])
            cases[r].append({**operands, "sent": n[r], "received": received, "layouts": layout})
    return cases


def delivered(rows: list, splits: list) -> list:
    """Return the rows that each rank gets, if rank s has rows[s] and sends splits[s][r] of them to rank r."""
    parts = [x.split(list(s)) for x, s in zip(rows, splits, strict=True)]
    return [torch.cat([p[r] for p in parts]) for r in range(len(rows))]


def judged(run, cases: list, members: list = (), **options) -> list:
    """Judge which rows arrive and which gradients go back; return all values and messages, [kind][rank]."""
    answers = in_group(run, probes.exchange, cases, members, **options)
    for kind, rank_cases, results in zip(KINDS, zip(*cases, strict=True), answers, strict=True):
        arrived = delivered([c["rows"] for c in rank_cases], [c["sent"] for c in rank_cases])
        for rank, (case, got) in enumerate(zip(rank_cases, results, strict=True)):
            what = f"rank {rank} of {len(rank_cases)}, {kind}"
            assert got["arrived"].dtype == arrived[rank].dtype, f"{what}: got {got['arrived'].dtype}"
            assert torch.equal(got["arrived"], arrived[rank]), (
                f"{what}: sent {case['sent']}, received {case['received']}: got {got['arrived'].tolist()}, expected "
                f"{arrived[rank].tolist()}: rows by the rank they come from"
                f"{row_order(got['arrived'], arrived[rank], 'rows')}"
            )
        back = delivered([c["weights"] for c in rank_cases], [c["received"] for c in rank_cases])
        for rank, got in enumerate(results if kind != "integers" else ()):
            close(
                got["gradient"], back[rank].double(), back[rank], f"rank {rank} of {len(rank_cases)}, {kind}, gradient",
                cause="backward is an exchange with sent and received swapped",
            )  # fmt: skip
    return answers


@exercise(EXCHANGE, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_arrive_by_rank_and_gradients_go_back(run, rng, world):
    judged(run, draw(rng, world))


@exercise(EXCHANGE, kind="numerics")
def test_a_group_that_is_a_part_of_the_world(run, rng):
    members = sorted(rng.shuffled(range(1, 5))[:3])
    judged(run, draw(rng, 3), members)


@exercise(EXCHANGE, kind="numerics")
def test_numbers_that_do_not_fit_are_refused(run):
    cases = [[3, [2], [2]], [3, [3, 0], [3, 0]], [3, [3], []], [3, [3], [3]]]
    errors = run(probes.refused, "exchange", [[torch.zeros(rows, 2), *splits, None] for rows, *splits in cases])
    want = ["ValueError"] * 3 + ["nothing"]
    assert errors == want, f"(rows, sent, received) of {cases}, alone: expected {want}, got {errors}"
    traces = run.trace(probes.refused, "exchange", [[torch.zeros(3, 2), [2, 0], [2, 0]]], True, world=2)
    per_rank = [trace.values for trace in traces]
    assert per_rank == [["ValueError"]] * 2, f"2 of 3 rows, on each of 2 ranks: expected ValueError, got {per_rank}"
    assert not any(trace.messages for trace in traces), "2 of 3 rows, on each of 2 ranks: raise before you send"


@exercise(EXCHANGE, kind="property")
def test_one_all_to_all_forward_and_one_backward(run, rng):
    world = rng.integers(2, 4)
    cases = draw(rng, world)
    for kind, _, rank, case, got in each_case(KINDS, cases, judged(run, cases)):
        row = math.prod(case["rows"].shape[1:]) * case["rows"].itemsize
        for phase, rows in (("forward", sum(case["sent"])), ("backward", sum(case["received"]))):
            sends(
                got["sent"][phase], [["all_to_all", rows * row]] * (phase == "forward" or kind != "integers"),
                f"rank {rank} of {world}, {kind}, {phase} of {rows} rows",
                "rows as they are, to nobody else, also where there is nothing to send", ("op", "bytes"),
            )  # fmt: skip


@exercise(EXCHANGE, kind="property")
def test_group_of_one_sends_nothing(run, rng):
    cases = draw(rng, 1)
    for no_group in (False, True):
        for kind, (got,) in zip(KINDS, judged(run, cases, no_group=no_group, world=1), strict=True):
            sent = [row["op"] for part in BOTH for row in got["sent"][part]]
            assert not sent, f"{kind}, a group of {'None' if no_group else 'one'}: issued {sent}, expected nothing"
