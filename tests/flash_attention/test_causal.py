"""The keys that each tile of queries visits.

Must hold: every key that a row sees is visited; tiles that are visited without a mask are seen whole by all rows; no
key beyond those of the last row is visited. Typical fakes: visit all tiles and mask them (caught by comparing each end
with the smallest possible); mask everywhere (caught because `full` must be as large as possible); ends that are right
only for equal lengths, or for multiples of a tile (caught by drawn lengths).
"""

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_kernels as probes
from .oracles import needs_triton

CAUSAL = "flash_attention.causal"
pytestmark = [needs_triton, pytest.mark.parametrize("kind", ["square", "more keys", "more queries"])]


def brute(i, queries, keys, block_m, block_n, is_causal) -> tuple[int, int]:
    """(full, end), from every row and key of the tile."""
    rows = range(i * block_m, min((i + 1) * block_m, queries))
    visible = {row: set(range(min(row + 1, keys) if is_causal else keys)) for row in rows}
    end = max(max(s) for s in visible.values()) + 1
    full = 0
    while full + block_n <= keys and all({*range(full, full + block_n)} <= s for s in visible.values()):
        full += block_n
    return full, end


def tile_map(i, queries, keys, block_m, block_n, is_causal) -> str:
    """Draw in one line which tiles of keys this tile of queries sees."""
    rows, line = range(i * block_m, min((i + 1) * block_m, queries)), ""
    for start in range(0, keys, block_n):
        seen = [sum(k <= row or not is_causal for k in range(start, min(start + block_n, keys))) for row in rows]
        line += "█" if min(seen) == block_n else "▒" if max(seen) else "·"
    return f"tiles of keys, left to right: {line} (█ seen whole by all rows, ▒ needs a mask, · seen by none)"


def check(run, rng, kind, is_causal, wrong) -> None:
    """wrong(full, end, limit, stop, block_n) returns what is wrong with full and end; limit and stop are right."""
    cases = []
    for _ in range(12):
        block_m, block_n = rng.choice([16, 32, 64]), rng.choice([16, 32, 64])
        queries = keys = rng.integers(1, 200)
        keys += rng.integers(1, 150) if kind == "more keys" else 0
        queries += rng.integers(1, 150) if kind == "more queries" else 0
        last = (queries - 1) // block_m
        i = rng.choice([last, rng.integers(0, last)])  # often the last tile, which may be short
        cases.append([i, queries, keys, block_m, block_n, is_causal])
    for case, got in zip(cases, run(probes.ranges, cases), strict=True):
        i, queries, keys, block_m, block_n, _ = case
        fault = wrong(*got, *brute(*case), block_n)
        assert not fault, (
            f"{fault}: tile {i} of {block_m} rows, {queries} queries, {keys} keys in tiles of {block_n}, "
            f"{'causal' if is_causal else 'not causal'}\n{tile_map(*case)}"
        )


@exercise(CAUSAL, kind="numerics")
def test_every_key_that_a_row_sees_is_visited(run, rng, kind):
    def wrong(full, end, limit, stop, block_n) -> str:
        return f"end is {end}, but key {stop - 1} is seen" if end < stop else ""

    check(run, rng, kind, True, wrong)


@exercise(CAUSAL, kind="numerics")
def test_unmasked_tiles_are_full_and_seen_by_all_rows(run, rng, kind):
    def wrong(full, end, limit, stop, block_n) -> str:
        if full % block_n:
            return f"full is {full}, expected a multiple of {block_n}: the walk without a mask is of whole tiles"
        return f"full is {full}, but all rows see only {limit} keys in whole tiles" if full > limit else ""

    check(run, rng, kind, True, wrong)


@exercise(CAUSAL, kind="numerics")
def test_without_a_mask_all_keys_are_visited(run, rng, kind):
    def wrong(full, end, limit, stop, block_n) -> str:
        return f"full and end are {full}, {end}, expected {limit}, {stop}" if (full, end) != (limit, stop) else ""

    check(run, rng, kind, False, wrong)


@exercise(CAUSAL, kind="property")
def test_no_tile_above_the_diagonal_is_visited(run, rng, kind):
    def wrong(full, end, limit, stop, block_n) -> str:
        measured("keys visited by a tile", end, stop, at_most=True)
        return f"end is {end}, but the last row sees only keys 0 to {stop - 1}" if end > stop else ""

    check(run, rng, kind, True, wrong)


@exercise(CAUSAL, kind="property")
def test_only_tiles_on_the_diagonal_compare_indices(run, rng, kind):
    def wrong(full, end, limit, stop, block_n) -> str:
        return f"full is {full}, expected {limit}: all rows see these keys, in whole tiles" if full != limit else ""

    check(run, rng, kind, True, wrong)
