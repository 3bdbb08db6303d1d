"""FLOPs and bytes of attention, counted by formula.

Must hold: FLOPs and bytes are those of the kernels in the exercise's docstring, for any sizes, tiles and dtypes, with
and without a mask. Typical fakes: formulas that fit one case (caught by drawn sizes that no tile divides and by queries
≠ keys; naive and flash, forward and backward are tested separately).
"""

import pytest

from lab.course.listing import inputs
from lab.harness.calls import called
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from .costs import DEFAULTS, KERNELS, PASSES, PRODUCTS, cost

ACCOUNTING = "flash_attention.accounting"
COUNT = "impl.flash_attention.accounting.accounting"


def draw(rng, algorithm: str, direction: str, is_causal: bool = False) -> dict:
    return {
        "batch": rng.integers(2, 9), "heads": rng.choice([10, 11, 12, 13, 14, 15, 20, 28]),
        "queries": rng.integers(100, 5000), "keys": rng.integers(100, 5000), "dim": rng.choice([16, 24, 64, 80, 128]),
        "algorithm": algorithm, "direction": direction, "is_causal": is_causal, "itemsize": rng.choice([1, 2, 4]),
        "block_m": rng.choice([16, 48, 64, 128]), "block_n": rng.choice([32, 80, 96, 256]),
    }  # fmt: skip


def check(run, cases: list[dict], cause: str = "", expected: list[dict] | None = None) -> None:
    """cause: hint for a wrong number; "": what should be counted. expected: replaces the oracle's numbers."""
    for case, want, got in zip(cases, expected or map(cost, cases), run(called, COUNT, cases), strict=True):
        kind = case["algorithm"], case["direction"]
        counts = {
            "flops": f"{PRODUCTS[kind]} products of queries × keys × dim, 2 a multiply-add",
            "bytes": "; ".join(KERNELS[kind]), "intensity": "FLOPs divided by bytes",
        }  # fmt: skip
        for name, value in want.items():
            exact = name != "intensity"
            assert isinstance(got[name], int) or not exact, f"{name} is a {type(got[name]).__name__}, expected int"
            what = f"{name} of {' '.join(kind)}"
            measured(what, got[name], value)
            assert abs(got[name] - value) <= (0 if exact else 1e-9 * value), (
                f"{what}: expected {value:,}, got {got[name]:,}: {cause or counts[name]}{inputs(case)}"
            )


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize(("algorithm", "direction"), PASSES)
def test_flops_and_bytes_without_a_mask(run, rng, algorithm, direction):
    check(run, [draw(rng, algorithm, direction) for _ in range(20)])


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize(("algorithm", "direction"), PASSES)
def test_a_causal_mask_halves_products_and_what_is_read_again(run, rng, algorithm, direction):
    check(run, [draw(rng, algorithm, direction, True) for _ in range(20)])


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tile_counts_are_rounded_up(run, rng, direction):
    """Lengths one below, equal to and one above a multiple of a tile, and lengths shorter than a tile."""
    cases = []
    for is_causal in (False, True):
        for offset in (-1, 0, 1):
            case = draw(rng, "flash", direction, is_causal)
            case["queries"] = case["block_m"] * rng.integers(1, 9) + offset
            case["keys"] = case["block_n"] * rng.integers(1, 9) + offset
            cases.append(case)
        cases.append(draw(rng, "flash", direction, is_causal) | {"queries": 1, "keys": rng.integers(1, 9)})
    check(run, cases, cause="a last tile that is not full is read as well: ⌈length / block⌉")


@exercise(ACCOUNTING, kind="numerics")
def test_defaults_are_16_bits_and_tiles_of_128(run, rng):
    cases = [{n: v for n, v in draw(rng, *p).items() if n not in DEFAULTS} for p in PASSES]
    check(run, cases, cause=f"defaults are {DEFAULTS}")


@exercise(ACCOUNTING, kind="numerics")
def test_an_example_by_hand(run):
    """4 queries, 6 keys, dim 2, 2 bytes: q has 16 bytes, k 24, s 48, lse 16; 2 tiles of 3 queries, 2 of 4 keys."""
    by_hand = [
        {"flops": 192, "bytes": (16 + 24 + 48) + (48 + 48) + (48 + 24 + 16)},
        {"flops": 384, "bytes": 88 + 88 + 3 * 48 + 88 + 88},
        {"flops": 192, "bytes": 16 + 16 + 16 + 2 * (24 + 24)},
        {"flops": 480, "bytes": (3 * 16 + 16 + 16 + 16 + 2 * 48) + (4 * 24 + 2 * (16 + 16 + 16 + 16))},
    ]
    sizes = {"batch": 1, "heads": 1, "queries": 4, "keys": 6, "dim": 2, "itemsize": 2, "block_m": 3, "block_n": 4}
    check(run, [sizes | {"algorithm": a, "direction": d} for a, d in PASSES], expected=by_hand)
