"""A profile as a table: for made-up profiles with drawn times, and for a real one.

Must hold: every kernel counts once, in the innermost range around the operator that launched it; every operator counts
with its own time. Typical fakes: total times, which count children twice; every event of the list, which counts kernels
twice and ranges as operators; products guessed from kernel names (caught by misleading names); key_averages(), which
knows no ranges.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_profile as probes

TABLE = "benchmarking.kernel_table"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::_scaled_mm")
OPERATORS = (*PRODUCTS, "aten::softmax", "aten::add", "aten::mul", "aten::copy_", "aten::matmul")
RANGES = ("forward", "backward", "attention", "gemm")  # a range is never a product, not even with this name
KERNELS = ("sm90_xmma_gemm", "elementwise_kernel", "cutlass_tile", "reduce_kernel", "triton_fused")


def draw(rng, depth: int, on_device: bool, parent: str = "") -> list:
    """Nodes [name, is range, own µs, [[kernel, µs]], children]; no node has its parent's name."""
    nodes = []
    for _ in range(rng.integers(2, 3)):
        is_range = depth > 1 and rng.uniform(0, 1) < 0.5
        names = RANGES if is_range else OPERATORS
        name = rng.choice([n for n in names if n != parent])
        kernels = []
        if on_device and not is_range:
            kernels = [[rng.choice(KERNELS), float(rng.integers(5, 900))] for _ in range(rng.integers(0, 2))]
        children = draw(rng, depth - 1, on_device, name) if depth else []
        nodes.append([name, is_range, float(2 * rng.integers(3, 400)), kernels, children])
    return nodes


def pieces(nodes: list, on_device: bool, range_: str = "") -> Iterator[tuple[str, str, str, float]]:
    """Yield (range, operator, kernel or operator that took the time, µs), each piece of time once."""
    for name, is_range, self_us, kernels, children in nodes:
        for what, microseconds in kernels if on_device else [] if is_range else [(name, self_us)]:
            yield range_, name, what, microseconds
        yield from pieces(children, on_device, name if is_range else range_)


def tabulate(pieces: Iterable[tuple[str, str, str, float]]) -> tuple[dict, dict, dict]:
    """{(range, name): [calls, seconds]}, {range: seconds}, {range: seconds of products}."""
    rows, total, products = defaultdict(lambda: [0, 0.0]), defaultdict(float), defaultdict(float)
    for range_, operator, what, microseconds in pieces:
        rows[range_, what][0] += 1
        rows[range_, what][1] += microseconds / 1e6
        total[range_] += microseconds / 1e6
        products[range_] += microseconds / 1e6 * (operator in PRODUCTS)
    return rows, total, products


def check(got: dict, rows: dict, total: dict, products: dict) -> None:
    found = {(row["range"], row["name"]): (row["calls"], row["seconds"]) for row in got["rows"]}
    assert len(found) == len(got["rows"]), "two rows of one range and name"
    for range_, name in sorted(set(rows) - set(found)):
        others = ", ".join(repr(r) for r, n in sorted(found) if n == name) or "none"
        raise AssertionError(f"no row for {name!r} in range {range_!r}; ranges that have one: {others}")
    for range_, name in sorted(set(found) - set(rows)):
        kernels = ", and rows are kernels" if name in OPERATORS and not {n for _, n in rows} & {*OPERATORS} else ""
        raise AssertionError(f"a row for {name!r} in range {range_!r}: no such kernel or operator ran there{kernels}")
    for (range_, name), (calls, seconds) in rows.items():
        c, s = found[range_, name]
        assert c == calls, f"{name!r} in range {range_!r}: {c} calls, expected {calls}"
        assert abs(s - seconds) <= 1e-9 + 1e-6 * seconds, (
            f"{name!r} in range {range_!r}: {s * 1e6:.1f} µs, expected {seconds * 1e6:.1f}: each piece of time once, "
            "without what was called from there"
        )
    times = [row["seconds"] for row in got["rows"]]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(times)), f"rows: the longest first, these take {times} s"
    by_range = got["product_share_by_range"]
    assert set(by_range) == set(total), f"shares of ranges {sorted(by_range)}, expected {sorted(total)}"
    shares = {f"range {r!r}": (by_range[r], products[r], total[r]) for r in total}
    shares["everything"] = got["product_share"], sum(products.values()), sum(total.values())
    for where, (share, product_s, total_s) in shares.items():
        expected = product_s / total_s if total_s else 0.0
        measured("share of matrix products in a profile", share, expected)
        assert abs(share - expected) <= 1e-6, f"matrix products take {expected:.4f} of {where}, got {share:.4f}"


@exercise(TABLE, kind="numerics")
@pytest.mark.parametrize("where", ["on the CPU", "on a device"])
@pytest.mark.parametrize("case", range(3))
def test_every_microsecond_is_counted_once_and_in_its_range(run, rng, case, where):
    on_device = where == "on a device"
    tree = draw(rng, 3, on_device)
    if on_device:
        tree.append(["aten::mm", False, 10.0, [["a_kernel_of_no_name", 77.0]], []])
    tree.append(["idle", True, 2.0, [], [["aten::mm", False, 0.0, [["instant", 0.0]] * on_device, []]]])  # share: 0
    tree.append(["empty", True, 4.0, [], []])  # no operators, so no share
    check(run(probes.table, tree, on_device), *tabulate(pieces(tree, on_device)))


@exercise(TABLE, kind="numerics")
def test_a_profile_of_nothing_is_an_empty_table(run):
    got = run(probes.table, [], False)
    assert got == {"rows": [], "product_share": 0.0, "product_share_by_range": {}}, f"no events: {got}"


@exercise(TABLE, kind="property")
def test_a_real_profile(run, rng):
    got = run(probes.real_profile, rng.shuffled(["one", "two", "three"])[:2])
    self_times = []
    for name, parent, microseconds, is_range in got["events"]:
        while parent >= 0 and not got["events"][parent][3]:
            parent = got["events"][parent][1]
        if not is_range:
            self_times.append((got["events"][parent][0] if parent >= 0 else "", name, name, microseconds))
    check(got, *tabulate(self_times))
