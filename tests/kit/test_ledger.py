"""Ledgers of ranks that ran separately: a line about the first operation on which two ranks disagree, or ""."""

import pytest

from lab.dryrun.accounts import Account
from lab.dryrun.matching import matched
from lab.ranks.ledger import Row


def account(rank: int, issued: list[tuple]) -> Account:
    """The account of a rank that issues these (op, bytes, other fields) in order, and then waits for all."""
    rows, numbers = [], range(len(issued))
    for number, (op, size, *extra) in enumerate(issued):
        other = {"dtype": "float32", "peer": -1, "group": [0, 1], **(extra[0] if extra else {})}
        row = Row(number, op, size, size // 4, phase="", rank=rank, issued_s=float(number), **other)
        rows.append(row.plain())
    return Account(rank, rows, 0, 0, {}, {}, [*(["issue", n, 0] for n in numbers), *(["wait", n] for n in numbers)])


ROOT_0, ROOT_1, PAIR, ALL = {"peer": 0}, {"peer": 1}, {"group": [0, 1]}, {"group": [0, 1, 2]}
STEP = [("broadcast", 64, ROOT_0), ("all_reduce", 4096), ("all_to_all", 40), ("barrier", 0, {"dtype": ""})]
REDUCED = "rank 0 issued all_reduce #1 (4 KiB, float32) over [0, 1]"
BROADCAST = "rank 0 issued broadcast #0 (64 B, float32) over [0, 1], root 0"
CASES = {  # rows of rank 0, rows of rank 1, line about the first mismatch
    "parts of other sizes": ([("all_to_all", 40)], [("all_to_all", 8)], ""),
    "another operation": (
        STEP, [STEP[0], ("broadcast", 4096, ROOT_0), ("reduce", 8)],
        f"mismatch: {REDUCED}; rank 1 issued broadcast #1 (4 KiB, float32) over [0, 1], root 0",
    ),
    "another dtype": (
        STEP, [STEP[0], ("all_reduce", 4096, {"dtype": "int64"})],
        f"mismatch: {REDUCED}; rank 1 issued all_reduce #1 (4 KiB, int64) over [0, 1]",
    ),
    "another root": (STEP, [("broadcast", 64, ROOT_1)], f"mismatch: {BROADCAST}; rank 1 issued {BROADCAST[14:-1]}1"),
    "one too few": (STEP, STEP[:3], "deadlock: rank 0 waits in barrier #3 (0 B) over [0, 1]"),
    "groups that only one is in": (
        [("all_reduce", 8, {"group": [0, 2]}), ("all_reduce", 4)],
        [("all_reduce", 4), ("all_reduce", 16, {"group": [1]})],
        "",
    ),
    "each group by itself": (
        [("all_reduce", 8, ALL), ("all_gather", 8, PAIR)], [("all_gather", 4, PAIR), ("all_reduce", 8, ALL)],
        "mismatch: rank 0 issued all_gather #1 (8 B, float32) over [0, 1]; "
        "rank 1 issued all_gather #0 (4 B, float32) over [0, 1]",
    ),
    "a recv of another size": (
        [("send", 8, ROOT_1)], [("recv", 4, ROOT_0)],
        "mismatch: rank 0 issued send #0 (8 B, float32) to rank 1; rank 1 issued recv #0 (4 B, float32) from rank 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_mismatch_is_named_on_both_ranks(case):
    first, second, want = CASES[case]
    ranks = [account(0, first), account(1, second)]
    assert matched(ranks) == matched(ranks[::-1]) == want


def test_unreceived_message_is_reported_even_without_a_wait():
    sender = account(0, [("send", 8, ROOT_1)])
    sender.trace = [["issue", 0, 0]]
    assert matched([sender, account(1, [])]) == "deadlock: rank 0 waits in send #0 (8 B) to rank 1 with tag 0"
