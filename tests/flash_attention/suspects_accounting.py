"""What attention's FLOPs and bytes, or a multiprocessor's programs, come to where one thing is counted wrong.

A reading is told only where it gives the numbers of all cases that were asked, so that none is met by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

from lab.judge import harmless

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
STEPS = {  # of softmax, in naive attention
    "forward": ": the kernel of softmax reads s and writes p, and both count, in place or not",
    "backward": ": the kernel of softmax's backward reads p and dp and writes ds, and all three count",
}
MADE = {"forward": ("o", "lse"), "backward": ("delta", "dq", "dk", "dv")}  # in one kernel; another may read them
LIKE = {  # tensors of one size
    "queries × dim": ("q", "o", "do", "dq"), "keys × dim": ("k", "v", "dk", "dv"),
    "queries × keys": ("s", "p", "dp", "ds"), "queries": ("lse", "delta"),
}  # fmt: skip
Term = tuple[int, str, str]  # the kernel, the tensor, and the tiles for each of which it moves: "" for once
Reading = tuple[str, Callable[[dict], int]]  # what may be wrong, and what a case then comes to


def terms(case: dict) -> list[Term]:
    """Kernel by kernel, tensor by tensor."""
    found = []
    for i, kernel in enumerate(KERNELS[case["algorithm"], case["direction"]]):
        once, _, again = kernel.partition(" | for each tile of ")
        over, _, names = again.partition(": ")
        found += [(i, n, "") for n in once.split()] + [(i, n, over) for n in names.split()]
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


def moved(case: dict, size: dict | None = None, times: dict | None = None, among: Iterable[Term] | None = None) -> int:
    """Bytes of all heads; of other sizes, other numbers of tiles or other terms where they are given."""
    size, times = sizes(case) | (size or {}), tiles(case) | (times or {})
    return int(case["batch"] * case["heads"] * sum(times[over] * size[n] for _, n, over in among or terms(case)))


def flops(case: dict, products: int | None = None, causal: Fraction = Fraction(1, 2)) -> int:
    """2 for each multiply-add; half of them under a causal mask."""
    products = products or PRODUCTS[case["algorithm"], case["direction"]]
    whole = 2 * products * case["queries"] * case["keys"] * case["dim"] * case["batch"] * case["heads"]
    return int(whole * (causal if case["is_causal"] else 1))


@harmless
def of_costs(name: str, cases: Sequence[dict], got: Sequence[int], case: dict) -> str:
    """What explains all that came for "flops" or "bytes", said of one case; "" where nothing does."""
    readings = of_flops(case) if name == "flops" else of_bytes(case)
    return _told(itertools.chain(_of_matrices(case, flops if name == "flops" else moved), readings), cases, got)


def _told(readings: Iterable[Reading], cases: Sequence[dict], got: Sequence[int], allowed: int = 1) -> str:
    """The first that gives all numbers; one byte more or less is another way of rounding a half."""
    for cause, count in readings:
        if all(abs(count(case) - each) <= allowed for case, each in zip(cases, got, strict=True)):
            return cause
    return ""


def _of_matrices(case: dict, count: Callable[[dict], int]) -> Iterator[Reading]:
    """What is counted of too few heads."""
    batch, heads = case["batch"], case["heads"]
    for share, forgotten in ((heads, ("heads",)), (batch, ("batch",)), (batch * heads, ("batch", "heads"))):
        yield (
            f"that is 1/{share} of what is expected: are {' and '.join(forgotten)} forgotten? all batch · heads "
            f"matrices count, here {batch} · {heads}",
            lambda c, forgotten=forgotten: count(c | dict.fromkeys(forgotten, 1)),
        )


def of_flops(case: dict) -> Iterator[Reading]:
    """Products, and what one of them costs."""
    right = PRODUCTS[case["algorithm"], case["direction"]]
    yield "a multiply-add is 2 FLOPs, not 1", lambda c: flops(c) // 2
    yield "a causal mask halves the products: they are counted whole", lambda c: flops(c, causal=Fraction(1))
    yield "a causal mask halves the products once, not twice", lambda c: flops(c, causal=Fraction(1, 4))
    for n in range(1, 9):
        yield (
            f"that is {n} products of queries × keys × dim, there are {right}",
            lambda c, n=n: flops(c, n),
        )
    yield "keys are not as many as queries", lambda c: flops(c | {"keys": c["queries"]})
    yield "queries are not as many as keys", lambda c: flops(c | {"queries": c["keys"]})


def of_bytes(case: dict) -> Iterator[Reading]:
    """Sizes, tiles, what a mask halves, and tensors that were forgotten or counted twice."""
    yield "k, v, dk and dv have as many rows as there are keys, not queries", _with_rows("keys × dim", "queries")
    yield "q, o, do and dq have as many rows as there are queries, not keys", _with_rows("queries × dim", "keys")
    yield (
        f"lse and delta are float32: 4 bytes a query, whatever q is made of (here {case['itemsize']} bytes a number)",
        lambda c: moved(c, dict.fromkeys(LIKE["queries"], c["queries"] * c["itemsize"])),
    )
    yield from _of_tiles(case)
    yield from _of_a_mask()
    yield from _of_terms(case)


def _with_rows(like: str, count: str) -> Callable[[dict], int]:
    return lambda c: moved(c, dict.fromkeys(LIKE[like], c[count] * c["dim"] * c["itemsize"]))


def _of_tiles(case: dict) -> Iterator[Reading]:
    """How many tiles there are."""
    again: dict[str, list[str]] = {}
    for _, name, over in terms(case):
        again.setdefault(over, []).append(name)
    yield (
        "block_m is of queries, block_n of keys: they are exchanged",
        lambda c: moved(c | {"block_m": c["block_n"], "block_n": c["block_m"]}),
    )
    present = [n for n in ("queries", "keys") if n in again]
    for which in ([present] if len(present) > 1 else []) + [[n] for n in present]:
        for least in (1, 0):
            yield (
                f"tiles of {' and '.join(which)} are rounded down: a last tile that is not full is read, too: "
                "⌈length / block⌉",
                lambda c, which=which, least=least: moved(
                    c, times=_tiled(c, which, lambda size, block: max(size // block, least))
                ),
            )
        yield (
            f"tiles of {' and '.join(which)} are a number of whole ones: ⌈length / block⌉, not length / block",
            lambda c, which=which: moved(c, times=_tiled(c, which, Fraction)),
        )
        yield (
            f"a tile of {' and '.join(which)} too many where block divides the length: ⌈length / block⌉",
            lambda c, which=which: moved(c, times=_tiled(c, which, lambda size, block: size // block + 1)),
        )
        yield (
            " and ".join(f"{' '.join(again[n])} are read again for each tile of {n}" for n in which) + ", not once",
            lambda c, which=which: moved(c, times=dict.fromkeys(which, Fraction(1))),
        )


def _tiled(case: dict, which: Sequence[str], count: Callable[[int, int], int | Fraction]) -> dict:
    half, block = tiles(case | {"queries": 1, "keys": 1})["queries"], {"queries": "block_m", "keys": "block_n"}
    return {n: half * count(case[n], case[block[n]]) for n in which}


def _of_a_mask() -> Iterator[Reading]:
    """What a causal mask halves."""
    for which, other in (("queries", "keys"), ("keys", "queries")):
        yield (
            f"a causal mask halves what is read for each tile of {which}, too, not only for each tile of {other}",
            lambda c, which=which: moved(c, times={which: tiles(c | {"is_causal": False})[which]}),
        )
    yield (
        "a causal mask halves what is read again for each tile, of keys and of queries",
        lambda c: moved(c | {"is_causal": False}),
    )
    yield (
        "a causal mask does not halve the matrices of naive attention: s, p, dp and ds are stored whole",
        lambda c: moved(c, {n: sizes(c)[n] * _half(c) for n in LIKE["queries × keys"]}),
    )
    yield "a causal mask halves what is read again for each tile, and nothing else", _all_halved


def _half(case: dict) -> Fraction:
    return Fraction(1, 2) if case["is_causal"] else Fraction(1)


def _all_halved(case: dict) -> int:
    return int(_half(case) * moved(case | {"is_causal": False}))


def _of_terms(case: dict) -> Iterator[Reading]:
    """One or two tensors of a size too few or too many, of those that move once or again for each tile."""
    every = terms(case)
    groups = {(over, like) for _, n, over in every for like in LIKE if n in LIKE[like]}
    for over, like in sorted(groups, key=lambda g: (g[1] != "queries × keys", g)):
        own = [t for t in every if t[2] == over and t[1] in LIKE[like]]
        place = f"that move for each tile of {over}" if over else "that move once"
        per_kernel = "; ".join(
            f"{' '.join(names)} in kernel {i + 1}{_verbs(names, case['direction'])}"
            for i in sorted({t[0] for t in own})
            if (names := [t[1] for t in own if t[0] == i])
        )
        per_kernel += STEPS[case["direction"]] if like == "queries × keys" else ""
        for n in (-1, 1, -2, 2):
            if len(own) + n >= 0:
                what = f"{_number(n)} of {'one number a query' if like == 'queries' else like}"
                yield (
                    f"{what} too {'few' if n < 0 else 'many'} among the {len(own)} {place}: {per_kernel}",
                    lambda c, n=n, own=own: moved(c) + n * moved(c, among=own[:1]),
                )


def _verbs(names: list[str], direction: str) -> str:
    """Which of a kernel's tensors are its results; "" where none is."""
    made = [n for n in names if n in MADE[direction]]
    return f" ({', '.join(made)} written)" if made else ""


def _number(n: int) -> str:
    return "one tensor" if abs(n) == 1 else f"{abs(n)} tensors"


# ---- occupancy ----

H100 = {
    "warps": 64, "programs": 32, "registers": 65_536, "register_unit": 256,
    "shared_bytes": 228 * 1024, "shared_unit": 128, "shared_reserved": 1024,
}  # fmt: skip
ORDER = ("warps", "programs", "registers", "shared memory")
Round = Callable[[int, int], int]


def up(amount: int, unit: int) -> int:
    """Rounded up to whole units."""
    return math.ceil(amount / unit) * unit


def room(case: dict, of_registers: Round = up, of_shared: Round = up, **other: int) -> dict[str, int]:
    """How many programs each resource allows; `of_registers` and `of_shared` round what is handed out.

    other: limits in place of the multiprocessor's.
    """
    m = case.get("limits", H100) | other
    each = {
        "warps": case["warps"], "programs": 1,
        "registers": case["warps"] * of_registers(32 * case["registers"], m["register_unit"]),
        "shared memory": of_shared(case["shared_bytes"] + m["shared_reserved"], m["shared_unit"]),
    }  # fmt: skip
    return {n: m["shared_bytes" if n == "shared memory" else n] // max(1, each[n]) for n in ORDER}


@harmless
def of_programs(cases: Sequence[dict], got: Sequence[int]) -> str:
    """What explains all numbers of programs; "" where nothing does."""
    return _told(_of_occupancy(), cases, got, 0)


def allowed(case: dict) -> str:
    """What each of the four resources allows."""
    return ", ".join(f"{n} {most}" for n, most in room(case).items())


def _of_occupancy() -> Iterator[Reading]:
    """Units, the reserve, which multiprocessor, and what is not looked at."""
    yield (
        "that is an H100's answer: use the multiprocessor that is given",
        lambda c: min(room(c, **H100).values()),
    )
    yield "a program that does not fit gives 0, not 1", lambda c: max(1, min(room(c).values()))
    for what, which in (
        ("registers of a warp", ("of_registers",)),
        ("shared memory of a program", ("of_shared",)),
        ("registers and shared memory", ("of_registers", "of_shared")),
    ):
        for cause, rounding in (
            ("round {} up: an exact multiple of the unit needs no unit more", _one_more),
            ("round {} up to whole units, not down", _down),
            ("round {} up to whole units, not down", _down_to_nothing),
            ("round {} up to whole units: less than one is not handed out", _not_at_all),
        ):
            yield (
                cause.format(what),
                lambda c, which=which, rounding=rounding: min(room(c, **dict.fromkeys(which, rounding)).values()),
            )
    yield "registers are rounded up for each warp, not for the program", _rounded_for_the_program
    yield "registers are those of a thread: a warp has 32 threads", lambda c: _with_registers(c, c["warps"], 1)
    yield "registers are those of all warps of a program", lambda c: _with_registers(c, 1, 32)
    yield (
        "the system reserves shared memory for each program: none is counted",
        lambda c: min(room(c, shared_reserved=0).values()),
    )
    yield "shared memory is reserved for each program, not once for the multiprocessor", _reserved_once
    yield (
        "shared memory is reserved within what is rounded up to whole units, not on top of it",
        lambda c: min(room(c, of_shared=_reserved_on_top(c)).values()),
    )
    for n in ORDER:
        yield f"{n} are a limit, too: it is not looked at", lambda c, n=n: min(v for k, v in room(c).items() if k != n)


def _one_more(amount: int, unit: int) -> int:
    return (amount // unit + 1) * unit


def _down(amount: int, unit: int) -> int:
    return max(amount // unit, 1) * unit


def _down_to_nothing(amount: int, unit: int) -> int:
    return amount // unit * unit


def _not_at_all(amount: int, unit: int) -> int:
    return amount


def _limits(case: dict) -> dict:
    return case.get("limits", H100)


def _rounded_for_the_program(case: dict) -> int:
    m = _limits(case)
    each = up(case["warps"] * 32 * case["registers"], m["register_unit"])
    return min((room(case) | {"registers": m["registers"] // each}).values())


def _with_registers(case: dict, warps: int, threads: int) -> int:
    m = _limits(case)
    each = warps * up(threads * case["registers"], m["register_unit"])
    return min((room(case) | {"registers": m["registers"] // each}).values())


def _reserved_once(case: dict) -> int:
    m = _limits(case)
    return min(room(case, shared_bytes=m["shared_bytes"] - m["shared_reserved"], shared_reserved=0).values())


def _reserved_on_top(case: dict) -> Round:
    reserved = _limits(case)["shared_reserved"]
    return lambda amount, unit: up(amount - reserved, unit) + reserved
