"""Which keys a tile of queries visits.

What must be true: every key that a row sees is visited, every tile that is walked without a mask is seen whole by all
of its rows, and no more keys are visited than the last row sees. How it would be faked: visit all tiles and mask (the
ends are compared with the smallest there are); mask everywhere (full has to be as large as it can be); ends that are
right where lengths are equal, or multiples of a tile (they are drawn so that they are neither).
"""

from __future__ import annotations

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_kernels as probes
from .oracles import needs_triton

CAUSAL = "flash_attention.causal"
SIZES = "(i, queries, keys, BLOCK_M, BLOCK_N)"
pytestmark = [needs_triton, pytest.mark.parametrize("kind", ["square", "more keys", "more queries"])]


def brute(i, queries, keys, block_m, block_n, is_causal) -> tuple[int, int]:
    """By looking at every row and key of the tile."""
    rows = range(i * block_m, min((i + 1) * block_m, queries))
    sees = {row: set(range(min(row + 1, keys) if is_causal else keys)) for row in rows}
    end = max(max(s) for s in sees.values()) + 1
    full = 0
    while full + block_n <= keys and all({*range(full, full + block_n)} <= s for s in sees.values()):
        full += block_n
    return full, end


def tiles(i, queries, keys, block_m, block_n, is_causal) -> str:
    """Its tiles of keys in a line."""
    rows, line = range(i * block_m, min((i + 1) * block_m, queries)), ""
    for start in range(0, keys, block_n):
        seen = [sum(k <= row or not is_causal for k in range(start, min(start + block_n, keys))) for row in rows]
        line += "█" if min(seen) == block_n else "▒" if max(seen) else "·"
    return f"tiles of keys, left to right: {line} (█ seen whole by all rows, ▒ needs a mask, · seen by none)"


def draw(rng, is_causal, kind) -> list:
    cases = []
    for _ in range(12):
        block_m, block_n = rng.choice([16, 32, 64]), rng.choice([16, 32, 64])
        queries = keys = rng.integers(1, 200)
        keys += rng.integers(1, 150) if kind == "more keys" else 0
        queries += rng.integers(1, 150) if kind == "more queries" else 0
        last = (queries - 1) // block_m
        i = rng.choice([last, rng.integers(0, last)])  # the last tile is short
        cases.append([i, queries, keys, block_m, block_n, is_causal])
    return cases


def asked(run, cases: list) -> list:
    """Of each case: itself, what came, (full, end), and what is right."""
    return [(case, got, brute(*case)) for case, got in zip(cases, run(probes.ranges, cases), strict=True)]


def check(run, cases: list, what: int) -> None:
    for case, got, want in asked(run, cases):
        i, queries, keys, block_m, block_n, is_causal = case
        assert got[what] == want[what], (
            f"{['full', 'end'][what]} is {got[what]}, expected {want[what]}: tile {i} of {block_m} rows, {queries} "
            f"queries, {keys} keys in tiles of {block_n}, {'causal' if is_causal else 'not causal'}"
        )


@exercise(CAUSAL, kind="numerics")
def test_every_key_that_a_row_sees_is_visited(run, rng, kind):
    for case, (_, end), (_, want) in asked(run, draw(rng, True, kind)):
        assert end >= want, f"end is {end} for {SIZES} = {case[:5]}: key {want - 1} is seen\n{tiles(*case)}"


@exercise(CAUSAL, kind="numerics")
def test_tiles_without_a_mask_are_seen_whole(run, rng, kind):
    for case, (full, _), (want, _) in asked(run, draw(rng, True, kind)):
        assert full % case[4] == 0, (
            f"full is {full} for {SIZES} = {case[:5]}: it is a multiple of BLOCK_N, round it down: the walk without a "
            f"mask is of whole tiles\n{tiles(*case)}"
        )
        assert full <= want, (
            f"full is {full} for {SIZES} = {case[:5]}: there is no key {full - 1}, or some row does not see it; all "
            f"rows see {want} keys\n{tiles(*case)}"
        )


@exercise(CAUSAL, kind="numerics")
def test_without_a_mask_all_keys_are_visited(run, rng, kind):
    cases = draw(rng, False, kind)
    for what in (0, 1):
        check(run, cases, what)


@exercise(CAUSAL, kind="property")
def test_no_tile_above_the_diagonal_is_visited(run, rng, kind):
    for case, (_, end), (_, want) in asked(run, draw(rng, True, kind)):
        i, queries, keys, block_m, block_n, _ = case
        measured(f"keys visited by tile {i}, {queries} queries and {keys} keys", end, want, at_most=True)
        assert end <= want, (
            f"end is {end}, {-(-end // block_n)} tiles of {block_n} keys, for tile {i} of {block_m} rows, {queries} "
            f"queries and {keys} keys: its last row sees keys 0 to {want - 1}\n{tiles(*case)}"
        )


@exercise(CAUSAL, kind="property")
def test_only_tiles_on_the_diagonal_compare_indices(run, rng, kind):
    cases = [c for c in draw(rng, True, kind) if c[0]] or [[1, 100, 100, 32, 32, True]]
    check(run, cases, 0)
