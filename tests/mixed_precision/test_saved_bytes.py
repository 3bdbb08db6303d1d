"""The bytes that autograd keeps, found in its graph.

Must hold: every storage that any node keeps counts once, whole, for the operation that ran first; parameters never
count. Typical fakes: sums of tensor sizes (caught by views, by results that two operations keep, and by transposed
weights); code that misses what a Function saves, or finds nothing else (caught by `Cube` among the operations).
"""

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_memory as probes

SAVED = "mixed_precision.saved_bytes"
RULE = ": a storage counts whole, once, for the operation that ran first, and a parameter's not at all"
START = ": two tensors may start in different places of one storage: untyped_storage().data_ptr() tells, not data_ptr()"
KINDS = (  # "square" first: it saves a leaf twice, as one object; for others, each access makes a new object
    "square", "linear", "transposed", "exp", "softmax", "relu", "in place", "norm", "view", "residual", "function",
    "nothing", "index",
)  # fmt: skip


def draw(rng, kinds: list[str]) -> tuple:
    rows, width = rng.integers(5, 30), 2 * rng.integers(4, 12)
    return kinds, rng.normal(rows, width), [rng.normal(width, width) / width**0.5 for _ in kinds]


def expected(rows: list[dict]) -> dict[str, int]:
    """{operation: bytes} by rows of probes.saved_rows: each storage once, whole, for the operation that ran first."""
    seen, sums = set(), dict[str, int]()
    for row in rows:
        if not row["is_parameter"] and row["storage"] not in seen:
            seen.add(row["storage"])
            sums[row["operation"]] = sums.get(row["operation"], 0) + row["size"]
    return sums


def check(run, drawn: tuple) -> None:
    got, rows = run(probes.saved, *drawn), run(probes.saved_rows, *drawn)
    want, chain = expected(rows), " -> ".join(drawn[0])
    starts = expected([row | {"storage": row["start"]} for row in rows])
    for operation in sorted(set(want) | set(got["by_operation"])):
        w, g = want.get(operation, 0), got["by_operation"].get(operation, 0)
        why = START if g == starts.get(operation, 0) else RULE
        assert g == w, f"{chain} on {tuple(drawn[1].shape)}: {operation} keeps {w:,} bytes, got {g:,}{why}"
    assert got["total"] == sum(want.values()), f"{chain}: {sum(want.values()):,} bytes in all, got {got['total']:,}"


@exercise(SAVED, kind="numerics")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_operation(run, rng, kind):
    check(run, draw(rng, [kind, rng.choice(["exp", "linear"])]))


@exercise(SAVED, kind="numerics")
@pytest.mark.parametrize("case", range(3))
def test_chains(run, rng, case):
    check(run, draw(rng, rng.shuffled(KINDS)[:7]))


@exercise(SAVED, kind="numerics")
def test_what_two_operations_keep_counts_once(run, rng):
    for kinds in (["exp", "square"], ["softmax", "exp", "function"], ["relu", "residual", "square"]):
        check(run, draw(rng, kinds))


@exercise(SAVED, kind="property")
def test_a_transformer_keeps_what_hooks_see(run, rng):
    sizes = {
        "layers": rng.integers(1, 2), "width": 32, "heads": 4, "kv_heads": 2, "hidden": rng.integers(40, 90),
        "vocabulary": rng.integers(40, 90), "context": 40,
    }  # fmt: skip
    got = run(probes.model_saved, sizes, rng.integers(1, 3), rng.integers(9, 30))
    assert got["sum"] == got["total"], f"by_operation sums to {got['sum']:,}, total is {got['total']:,}"
    # A Python number as divisor is kept, too: 8 bytes that no hook sees.
    measured("bytes kept by a transformer, beside what hooks see", got["total"], got["hooks"], "bytes")
    assert 0 <= got["total"] - got["hooks"] <= 8 * sizes["layers"], (
        f"hooks see {got['hooks']:,} bytes kept without parameters, saved_bytes says {got['total']:,}"
    )
