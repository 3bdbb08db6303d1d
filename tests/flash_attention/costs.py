"""Oracle of attention's FLOPs and bytes: kernel by kernel, tensor by tensor."""

import math
from fractions import Fraction

PASSES = [(a, d) for a in ("naive", "flash") for d in ("forward", "backward")]
# per kernel: the tensors that it reads or writes once | those that it reads again for each tile
KERNELS = {
    ("naive", "forward"): ["q k s", "s p", "p v o"],
    ("naive", "backward"): ["p do dv", "do v dp", "p dp ds", "ds k dq", "ds q dk"],
    ("flash", "forward"): ["q o lse | for each tile of queries: k v"],
    ("flash", "backward"): [
        "q o do lse dq delta | for each tile of queries: k v",
        "k v dk dv | for each tile of keys: q do lse delta",
    ],
}
PRODUCTS = dict(zip(PASSES, (2, 4, 2, 5), strict=True))
DEFAULTS = {"is_causal": False, "itemsize": 2, "block_m": 128, "block_n": 128}


def cost(case: dict) -> dict:
    """FLOPs and bytes of all heads, and FLOPs per byte."""
    case = DEFAULTS | case
    kind, heads = (case["algorithm"], case["direction"]), case["batch"] * case["heads"]
    queries, keys, dim, itemsize = (case[n] for n in ("queries", "keys", "dim", "itemsize"))
    share = Fraction(1, 2) if case["is_causal"] else Fraction(1)  # of the products, and of what is read again
    size = {  # bytes of each tensor, of one head
        **dict.fromkeys(("q", "o", "do", "dq"), queries * dim * itemsize),
        **dict.fromkeys(("k", "v", "dk", "dv"), keys * dim * itemsize),
        **dict.fromkeys(("s", "p", "dp", "ds"), queries * keys * itemsize),
        **dict.fromkeys(("lse", "delta"), 4 * queries),
    }
    tiles = {"queries": math.ceil(queries / case["block_m"]), "keys": math.ceil(keys / case["block_n"])}
    moved = Fraction(0)
    for kernel in KERNELS[kind]:
        once, _, reread = kernel.partition(" | for each tile of ")
        tiled, _, names = reread.partition(": ")
        moved += sum(size[n] for n in once.split()) + sum(share * tiles[tiled] * size[n] for n in names.split())
    flops, moved = int(heads * share * 2 * PRODUCTS[kind] * queries * keys * dim), int(heads * moved)
    return {"flops": flops, "bytes": moved, "intensity": flops / moved}
