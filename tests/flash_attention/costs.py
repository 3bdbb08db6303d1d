"""Oracles of attention's FLOPs and bytes: kernel by kernel, tensor by tensor."""

from __future__ import annotations

import math
from fractions import Fraction

PASSES = [(a, d) for a in ("naive", "flash") for d in ("forward", "backward")]
# kernel: what it reads and writes once, and what it reads again for each tile of the other kind
KERNELS = {
    ("naive", "forward"): ["q k s", "s p", "p v o"],
    ("naive", "backward"): ["p do dv", "do v dp", "p dp ds", "ds k dq", "ds q dk"],
    ("flash", "forward"): ["q o lse | for each tile of queries: k v"],
    ("flash", "backward"): [
        "q o do lse dq delta | for each tile of queries: k v",
        "k v dk dv | for each tile of keys: q do lse delta",
    ],
}
PRODUCTS = {
    ("naive", "forward"): 2, ("flash", "forward"): 2, ("naive", "backward"): 4, ("flash", "backward"): 5,
}  # fmt: skip
LIKE = {  # tensors of one size
    "queries × dim": ("q", "o", "do", "dq"), "keys × dim": ("k", "v", "dk", "dv"),
    "queries × keys": ("s", "p", "dp", "ds"), "queries": ("lse", "delta"),
}  # fmt: skip


def terms(case: dict) -> list[tuple[str, str]]:
    """(tensor, tiles for each of which a kernel moves it; "" for once)."""
    found = []
    for kernel in KERNELS[case["algorithm"], case["direction"]]:
        once, _, again = kernel.partition(" | for each tile of ")
        over, _, names = again.partition(": ")
        found += [(n, "") for n in once.split()] + [(n, over) for n in names.split()]
    return found


def sizes(case: dict) -> dict[str, Fraction]:
    """Bytes of each tensor, of one head."""
    queries, keys, dim, itemsize = (Fraction(case[n]) for n in ("queries", "keys", "dim", "itemsize"))
    of = {
        "queries × dim": queries * dim * itemsize, "keys × dim": keys * dim * itemsize,
        "queries × keys": queries * keys * itemsize, "queries": 4 * queries,
    }  # fmt: skip
    return {name: size for like, size in of.items() for name in LIKE[like]}


def tiles(case: dict) -> dict[str, Fraction]:
    """How often a term moves: by half of the tiles under a causal mask."""
    half = Fraction(1, 2) if case["is_causal"] else Fraction(1)
    return {
        "": Fraction(1), "queries": half * math.ceil(case["queries"] / case["block_m"]),
        "keys": half * math.ceil(case["keys"] / case["block_n"]),
    }  # fmt: skip


def moved(case: dict) -> int:
    """Bytes of all heads."""
    size, times = sizes(case), tiles(case)
    return int(case["batch"] * case["heads"] * sum(times[over] * size[n] for n, over in terms(case)))


def flops(case: dict) -> int:
    """2 for each multiply-add; half of them under a causal mask."""
    products = PRODUCTS[case["algorithm"], case["direction"]]
    whole = 2 * products * case["queries"] * case["keys"] * case["dim"] * case["batch"] * case["heads"]
    return whole // 2 if case["is_causal"] else whole
