"""What a count of saved bytes comes to, and what where one thing of it is wrong, so that a message can name it.

By rows of probes_memory.walked: what every node keeps, in the order in which they ran.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from lab.judge import harmless

Row = dict  # node, operation, tensor, storage, size, own, is_parameter, is_function, straight
Sums = dict[str, int]


def expected(rows: Sequence[Row]) -> Sums:
    """Each storage once, whole, for the operation that ran first."""
    return summed([row for row in rows if not row["is_parameter"]], lambda row: row["storage"])


def summed(rows: Sequence[Row], once: Callable[[Row], Hashable] | None, size: str = "size") -> Sums:
    """Bytes by operation; once: what counts no second time, None where everything does."""
    seen, sums = set(), dict[str, int]()
    for row in rows:
        key = once(row) if once else len(seen)
        if key not in seen:
            seen.add(key)
            sums[row["operation"]] = sums.get(row["operation"], 0) + row[size]
    return sums


@harmless
def of(rows: Sequence[Row], got: Sums, operation: str) -> str:
    """What explains all that came, or a part of what is too much for one operation; begins with ": "."""
    got = {name: size for name, size in got.items() if size}
    for cause, sums in _readings(rows):
        if {name: size for name, size in sums.items() if size} == got:
            return f": {cause}"
    return _again(rows, got.get(operation, 0) - expected(rows).get(operation, 0), operation)


def _readings(rows: Sequence[Row]) -> Iterator[tuple[str, Sums]]:
    free = [row for row in rows if not row["is_parameter"]]
    once = [row["storage"] for row in free]
    if len({row["tensor"] for row in free}) < len(free):  # else nobody could tell these two
        yield "every tensor that is kept counts, each time; a storage counts once", summed(free, None)
        yield (
            "one tensor object counts once, a storage twice: nodes hand out several tensor objects with one "
            "untyped_storage().data_ptr()",
            summed(free, lambda row: row["tensor"]),
        )
    yield (
        "that is what saved tensors take, not their storages: of a view's, all of it is kept",
        summed(free, lambda row: row["storage"], "own"),
    )
    yield "storages of parameters are counted, too", summed(rows, lambda row: row["storage"])
    yield (
        "what the node of a torch.autograd.Function keeps is missing",
        summed([row for row in free if not row["is_function"]], lambda row: row["storage"]),
    )
    if len(set(once)) < len(once):
        yield (
            "a storage is counted for the operation that ran last among those that keep it, not first",
            summed(free[::-1], lambda row: row["storage"]),
        )
    yield (
        "nodes that only a second entry of next_functions leads to are missing",
        summed([row for row in free if row["straight"]], lambda row: row["storage"]),
    )


def _again(rows: Sequence[Row], surplus: int, operation: str) -> str:
    """Storages that count for this operation although they had been counted, where they are what is too much."""
    seen: dict[int, Row] = {}
    again: list[tuple[Row, Row]] = []  # the first that keeps a storage, and this one
    for row in rows:
        if row["is_parameter"]:
            continue
        if row["storage"] not in seen:
            seen[row["storage"]] = row
        elif row["operation"] == operation:
            again.append((seen[row["storage"]], row))
    if not again or sum(row["size"] for _, row in again) != surplus:
        return ""
    first, row = again[0]
    kept = "as the same tensor object" if first["tensor"] == row["tensor"] else "as another tensor object"
    whose = "that node" if first["node"] == row["node"] else first["operation"]
    have = "that storage has" if len(again) == 1 else f"those {len(again)} storages have"
    return (
        f": {have} been counted: {whose} keeps {'it' if len(again) == 1 else 'the first'}, too, {kept} with the same "
        "untyped_storage().data_ptr()"
    )
