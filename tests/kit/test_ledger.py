"""The ledger's diff: one line about the first operation on which two ranks disagree; "" if they agree."""

from __future__ import annotations

import pytest

from lab.dryrun.mismatch import diff
from lab.ranks.ledger import Row


def rows(rank: int, told: list[tuple]) -> list[dict]:
    """Rows of one rank, from (op, bytes) and other fields that differ from the defaults."""
    made = []
    for number, (op, size, *more) in enumerate(told):
        other = {"dtype": "float32", "peer": -1, "group": [0, 1], **(more[0] if more else {})}
        row = Row(number, op, size, size // 4, phase="", rank=rank, issued_s=float(number), **other)
        made.append(row.plain())
    return made


ROOT_0, ROOT_1, PAIR, WHOLE = {"peer": 0}, {"peer": 1}, {"group": [0, 1]}, {"group": [0, 1, 2]}
STEP = [("broadcast", 64, ROOT_0), ("all_reduce", 4096), ("all_to_all", 40), ("barrier", 0, {"dtype": ""})]
REDUCED = "rank 0 issued all_reduce #1 (4 KiB, float32) over [0, 1]"
BROADCAST = "rank 0 issued broadcast #0 (64 B, float32) over [0, 1], root 0"


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (STEP, STEP, ""),
        ([], [], ""),
        ([("all_to_all", 40)], [("all_to_all", 8)], ""),
        *(
            (STEP, [STEP[0], change, ("reduce", 8)], f"{REDUCED}; rank 1 issued {told}")
            for change, told in (
                (("broadcast", 4096, ROOT_0), "broadcast #1 (4 KiB, float32) over [0, 1], root 0"),
                (("all_reduce", 2048), "all_reduce #1 (2 KiB, float32) over [0, 1]"),
                (("all_reduce", 4096, {"dtype": "int64"}), "all_reduce #1 (4 KiB, int64) over [0, 1]"),
            )
        ),
        (STEP, [("broadcast", 64, ROOT_1)], f"{BROADCAST}; rank 1 issued {BROADCAST[14:-1]}1"),
        (STEP, STEP[:3], "rank 0 issued barrier #3 (0 B) over [0, 1]; rank 1 issued no barrier for it"),
        (STEP, [], f"{BROADCAST}; rank 1 issued no broadcast for it"),
        (  # groups that only one is in do not count
            [("all_reduce", 8, {"group": [0, 2]}), ("all_reduce", 4)],
            [("all_reduce", 4), ("all_reduce", 16, {"group": [1]}), ("broadcast", 4, {"group": [1, 3], "peer": 3})],
            "",
        ),
        (  # each group is compared by itself
            [("all_reduce", 8, WHOLE), ("all_gather", 8, PAIR), ("all_gather", 8, PAIR)],
            [("all_gather", 8, PAIR), ("all_reduce", 8, WHOLE), ("all_gather", 4, PAIR)],
            "rank 0 issued all_gather #2 (8 B, float32) over [0, 1]; "
            "rank 1 issued all_gather #2 (4 B, float32) over [0, 1]",
        ),
        *(  # a send is matched with a recv
            ([("send", 8, ROOT_1), ("recv", 16, ROOT_1), ("send", 4, {"peer": 2})], [*second], told)
            for *second, told in (
                (("send", 16, ROOT_0), ("recv", 8, ROOT_0), ""),
                (
                    ("send", 16, ROOT_0),
                    ("recv", 4, ROOT_0),
                    "rank 0 issued send #0 (8 B, float32) to rank 1; rank 1 issued recv #1 (4 B, float32) from rank 0",
                ),
                (
                    ("recv", 8, ROOT_0),
                    "rank 0 issued recv #1 (16 B, float32) from rank 1; rank 1 issued no send for it",
                ),
            )
        ),
    ],
)
def test_the_first_mismatch_is_named_on_both_ranks(first, second, told):
    a, b = rows(0, first), rows(1, second)
    assert diff(a, b) == told
    assert diff(b, a) == "; ".join(reversed(told.split("; ")))
