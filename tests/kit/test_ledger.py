"""The ledger's diff: the first thing on which two ranks disagree, told in one line, and nothing where they agree."""

from __future__ import annotations

import pytest

from lab.harness.runner import Executor, Runner
from lab.ranks.ledger import Row, diff

from . import probes


def rows(rank: int, *told: tuple, group=(0, 1)) -> list[Row]:
    """Rows of one rank, from (op, bytes) and what else is not as usual."""
    made = []
    for number, (op, size, *more) in enumerate(told):
        other = {"dtype": "float32", "peer": -1, "group": list(group), **(more[0] if more else {})}
        made.append(Row(number, op, size, size // 4, phase="", rank=rank, issued_s=float(number), **other))
    return made


STEP = [("broadcast", 64, {"peer": 0}), ("all_reduce", 4096), ("all_to_all", 40), ("barrier", 0, {"dtype": ""})]


def test_ranks_that_did_the_same_do_not_differ():
    a, b = rows(0, *STEP), rows(1, *STEP)
    assert diff(a, b) == ""
    assert diff([r.plain() for r in a], b) == ""
    assert diff([], []) == ""


def test_parts_of_an_all_to_all_may_differ_in_size():
    assert diff(rows(0, ("all_to_all", 40)), rows(1, ("all_to_all", 8))) == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("broadcast", 4096, {"peer": 0}), "rank 1 issued broadcast #1 (4 KiB, float32) over [0, 1], root 0"),
        (("all_reduce", 2048), "rank 1 issued all_reduce #1 (2 KiB, float32) over [0, 1]"),
        (("all_reduce", 4096, {"dtype": "int64"}), "rank 1 issued all_reduce #1 (4 KiB, int64) over [0, 1]"),
    ],
)
def test_the_first_mismatch_is_named_on_both_ranks(change, told):
    a, b = rows(0, *STEP), rows(1, STEP[0], change, ("reduce", 8))
    assert diff(a, b) == f"rank 0 issued all_reduce #1 (4 KiB, float32) over [0, 1]; {told}"
    assert diff(b, a) == "; ".join(reversed(diff(a, b).split("; ")))


def test_another_root_is_a_mismatch():
    a, b = rows(0, ("broadcast", 64, {"peer": 0})), rows(1, ("broadcast", 64, {"peer": 1}))
    assert diff(a, b).endswith("over [0, 1], root 0; rank 1 issued broadcast #0 (64 B, float32) over [0, 1], root 1")


def test_what_only_one_has_issued_is_named():
    a = rows(0, *STEP)
    assert diff(a, rows(1, *STEP[:3])) == "rank 0 issued barrier #3 (0 B) over [0, 1]; rank 1 issued no barrier for it"
    assert diff(a, []).startswith("rank 0 issued broadcast #0")
    assert (
        diff([], a)
        == "rank 1 issued no broadcast for it; rank 0 issued broadcast #0 (64 B, float32) over [0, 1], root 0"
    )


def test_groups_that_only_one_is_in_do_not_count():
    a = rows(0, ("all_reduce", 8, {"group": [0, 2]}), ("all_reduce", 4))
    b = rows(1, ("all_reduce", 4), ("all_reduce", 16, {"group": [1]}), ("broadcast", 4, {"group": [1, 3], "peer": 3}))
    assert diff(a, b) == ""


def test_groups_are_compared_one_by_one():
    whole, pair = {"group": [0, 1, 2]}, {"group": [0, 1]}
    a = rows(0, ("all_reduce", 8, whole), ("all_gather", 8, pair), ("all_gather", 8, pair))
    b = rows(1, ("all_gather", 8, pair), ("all_reduce", 8, whole), ("all_gather", 4, pair))
    assert diff(a, b).startswith("rank 0 issued all_gather #2 (8 B")


def test_sends_are_matched_with_recvs():
    to, back = {"peer": 1}, {"peer": 0}
    a = rows(0, ("send", 8, to), ("recv", 16, to), ("send", 4, {"peer": 2}))
    assert diff(a, rows(1, ("send", 16, back), ("recv", 8, back))) == ""
    assert (
        diff(a, rows(1, ("send", 16, back), ("recv", 4, back)))
        == "rank 0 issued send #0 (8 B, float32) to rank 1; rank 1 issued recv #1 (4 B, float32) from rank 0"
    )
    assert (
        diff(a, rows(1, ("recv", 8, back)))
        == "rank 0 issued recv #1 (16 B, float32) from rank 1; rank 1 issued no send for it"
    )


def test_what_ranks_really_did_agrees(tmp_path):
    r = Runner(Executor(tmp_path))
    a, b = (got["rows"] for got in r.run(probes.every_collective, world=2))
    r.close()
    assert diff(a, b) == ""
    b = [row for row in b if row["op"] != "reduce_scatter"]
    assert diff(a, b).startswith(
        "rank 0 issued reduce_scatter #5 (8 B, float32) over [0, 1]; rank 1 issued all_to_all #6"
    )
