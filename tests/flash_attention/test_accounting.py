"""What attention costs, counted on paper.

What must be true: FLOPs and bytes are those of the kernels that the docstring lists, for any sizes, tiles, dtypes and
both masks. How it would be faked: formulas that fit one case (sizes and tiles are drawn so that nothing divides and
queries differ from keys; naive and flash, forward and backward are judged by themselves). The FLOPs are also counted by
torch in a real pass of naive attention.
"""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from lab.course.listing import inputs
from lab.harness.calls import called
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from .costs import KERNELS, PASSES, PRODUCTS, flops, moved

ACCOUNTING = "flash_attention.accounting"
COUNT = "impl.flash_attention.accounting.accounting"


def counted(case: dict) -> dict:
    return {"flops": flops(case), "bytes": moved(case)}


def draw(rng, algorithm: str, direction: str, is_causal: bool = False) -> dict:
    return {
        "batch": rng.integers(2, 9), "heads": rng.choice([10, 11, 12, 13, 14, 15, 20, 28]),
        "queries": rng.integers(100, 5000), "keys": rng.integers(100, 5000), "dim": rng.choice([16, 24, 64, 80, 128]),
        "algorithm": algorithm, "direction": direction, "is_causal": is_causal, "itemsize": rng.choice([1, 2, 4]),
        "block_m": rng.choice([16, 48, 64, 128]), "block_n": rng.choice([32, 80, 96, 256]),
    }  # fmt: skip


def check(run, cases: list[dict], cause: str = "") -> None:
    """cause: what to say where a number is off; else what is counted."""
    for case, got in zip(cases, run(called, COUNT, cases), strict=True):
        for name, want in counted(case).items():
            assert isinstance(got[name], int), f"{name} is a {type(got[name]).__name__}, expected int"
            measured(f"{name}, {case['algorithm']}, {case['direction']}", got[name], want)
            assert got[name] == want, (
                f"{name}: expected {want:,}, got {got[name]:,}: {cause or listed(name, case)}{inputs(case)}"
            )


def listed(name: str, case: dict) -> str:
    """What is counted."""
    which = (case["algorithm"], case["direction"])
    return f"{PRODUCTS[which]} products, 2 a multiply-add" if name == "flops" else "; ".join(KERNELS[which])


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
def test_tiles_are_counted_upwards(run, rng, direction):
    """Lengths one below, at and one above a multiple of a tile, and shorter than one."""
    cases = []
    for is_causal in (False, True):
        for more in (-1, 0, 1):
            case = draw(rng, "flash", direction, is_causal)
            case["queries"] = case["block_m"] * rng.integers(1, 9) + more
            case["keys"] = case["block_n"] * rng.integers(1, 9) + more
            cases.append(case)
        cases.append(draw(rng, "flash", direction, is_causal) | {"queries": 1, "keys": rng.integers(1, 9)})
    check(run, cases, cause="a last tile that is not full is read as well: ⌈length / block⌉")


@exercise(ACCOUNTING, kind="numerics")
def test_defaults_are_16_bits_and_tiles_of_128(run, rng):
    optional = {"itemsize": 2, "block_m": 128, "block_n": 128, "is_causal": False}
    cases = [draw(rng, *p) | optional for p in PASSES]
    short = [{n: v for n, v in case.items() if n not in optional} for case in cases]
    for case, got in zip(cases, run(called, COUNT, short), strict=True):
        for name, want in counted(case).items():
            assert got[name] == want, (
                f"{name} of {case['algorithm']} {case['direction']} without optional arguments: expected "
                f"{want:,}, got {got[name]:,}: defaults are {optional}"
            )


@exercise(ACCOUNTING, kind="numerics")
def test_flops_are_those_that_torch_counts(run, rng):
    """In naive attention, forward and backward; and once more with the scores computed again."""
    batch, heads, queries, keys, dim = (rng.integers(2, 4) for _ in range(5))
    queries, keys, dim = queries * 7, keys * 5 + 40, dim * 8
    q, k, v = (rng.normal(batch, heads, n, dim).requires_grad_() for n in (queries, keys, keys))
    with FlopCounterMode(display=False) as forward:
        o = (q @ k.mT).softmax(-1) @ v
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    with FlopCounterMode(display=False) as again:
        q @ k.mT
    want = {
        ("naive", "forward"): forward.get_total_flops(),
        ("flash", "forward"): forward.get_total_flops(),
        ("naive", "backward"): backward.get_total_flops(),
        ("flash", "backward"): backward.get_total_flops() + again.get_total_flops(),
    }
    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "dim": dim}
    cases = [sizes | {"algorithm": a, "direction": d} for a, d in PASSES]
    for which, got in zip(PASSES, run(called, COUNT, cases), strict=True):
        assert got["flops"] == want[which], (
            f"{' '.join(which)} of {sizes}: torch's counter says {want[which]:,} FLOPs, got {got['flops']:,}: "
            f"{PRODUCTS[which]} products of queries × keys × dim, 2 a multiply-add"
        )


@exercise(ACCOUNTING, kind="numerics")
def test_an_example_by_hand(run):
    """4 queries, 6 keys, dim 2, 2 bytes: q has 16 bytes, k 24, s 48, lse 16; 2 tiles of 3 queries, 2 of 4 keys."""
    by_hand = {
        ("naive", "forward"): (192, (16 + 24 + 48) + (48 + 48) + (48 + 24 + 16)),
        ("naive", "backward"): (384, 88 + 88 + 3 * 48 + 88 + 88),
        ("flash", "forward"): (192, 16 + 16 + 16 + 2 * (24 + 24)),
        ("flash", "backward"): (480, (3 * 16 + 16 + 16 + 16 + 2 * 48) + (4 * 24 + 2 * (16 + 16 + 16 + 16))),
    }
    sizes = {"batch": 1, "heads": 1, "queries": 4, "keys": 6, "dim": 2, "itemsize": 2, "block_m": 3, "block_n": 4}
    cases = [sizes | {"algorithm": a, "direction": d} for a, d in PASSES]
    for which, got in zip(PASSES, run(called, COUNT, cases), strict=True):
        assert (got["flops"], got["bytes"]) == by_hand[which], (
            f"{' '.join(which)} of {sizes}: expected {by_hand[which]} FLOPs and bytes, got "
            f"{(got['flops'], got['bytes'])}: {'; '.join(KERNELS[which])}"
        )


@exercise(ACCOUNTING, kind="numerics")
def test_intensity_is_flops_a_byte(run, rng):
    cases = [draw(rng, *p, rng.choice([False, True])) for p in PASSES for _ in range(3)]
    for case, got in zip(cases, run(called, COUNT, cases), strict=True):
        want = counted(case)
        intensity = want["flops"] / want["bytes"]
        assert abs(got["intensity"] - intensity) <= 1e-9 * intensity, (
            f"intensity: expected {intensity:.4f} FLOPs a byte, got {got['intensity']:.4f}"
            f"{': that is bytes a FLOP' if abs(got['intensity'] * intensity - 1) < 1e-9 else ''}"
            f"{inputs(case)}"
        )
