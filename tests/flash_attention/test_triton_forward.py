"""The fused forward kernel.

Must hold: o and lse are those of attention in float64 for any lengths, heads, widths, strides and dtypes. One kernel
computes them, never writes scores and, with a causal mask, never reads a tile above the diagonal. Typical fakes: torch
does the work (caught because only allocation, views and casts are allowed in the call); a kernel is launched for show
(caught because torch.empty is NaN until a kernel writes); only multiples of a tile, equal lengths or dense strides work
(caught by drawn ones); whole rows are one tile (caught by counting loads and stores by address, in runs whose output is
judged); sums in low precision (caught by thousands of keys); softmax without a maximum (caught by logits × 50); every
tile is read and masked.
"""

import functools
import math

import pytest
import torch

from lab.harness import layouts
from lab.harness.calls import refused
from lab.harness.pytest_plugin import exercise

from . import judged
from .oracles import MAX_ROWS, MODES, PRECISIONS, draw, needs_triton

FORWARD = "flash_attention.triton_forward"
LENGTHS = "does the last tile stop where queries and keys do, and are all strides used?"
STRIDES = "are all four strides used, and each for its own tensor?"
pytestmark = [needs_triton, pytest.mark.parametrize("where", MODES)]


@pytest.fixture
def check(run, rng, expect, where):
    return functools.partial(judged.check, "forward", run, rng, expect, where=where)


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_lengths_that_fit_no_tile(check, rng, dtype):
    for low, high in ((1, 15), (17, 60), (65, 127), (129, 200)):
        check(draw(rng, rng.integers(low, high), rng.integers(low, high), dtype=dtype), False, LENGTHS)


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_causal_attention(check, rng, dtype):
    n = rng.integers(130, 190)
    for sizes in ((n, n), (n, n + rng.integers(5, 90)), (n + rng.integers(5, 90), n), (7, 150), (150, 7)):
        check(draw(rng, *sizes, dtype=dtype, dim=32), True, "query i sees keys 0 … i, aligned top left")


@exercise(FORWARD, kind="numerics")
def test_one_query_one_key(check, rng):
    for dtype in ("float32", "float16"):
        drawn = draw(rng, 1, 1, batch=1, heads=1, dim=rng.choice([20, 33]), dtype=dtype)
        check(drawn, rng.choice([False, True]), "a dimension of one has any stride")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dim", [1, 16, 24, 40, 64, 80, 128, 256])
def test_every_width_of_a_head(check, rng, dim):
    sizes = rng.integers(20, 90), rng.integers(20, 90)
    drawn = draw(rng, *sizes, dim=dim, dtype=rng.choice(["float32", "float16"]))
    check(drawn, rng.choice([False, True]), "tiles are padded, the scale is that of dim")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_several_tiles_of_a_wide_head(check, rng, is_causal):
    drawn = draw(rng, rng.integers(260, 300), rng.integers(260, 300), batch=1, heads=1, dim=128, dtype="float16")
    check(drawn, is_causal, "is every tile of v multiplied by the p of its own keys?")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("case", range(4))
def test_any_strides(check, rng, dtype, case):
    q, k, v, do = draw(rng, rng.integers(40, 90), rng.integers(40, 90), batch=2, heads=2, dtype=dtype)
    given, layout = layouts.different(rng, q=q, k=k, v=v)
    check((*given.values(), do), rng.choice([False, True]), STRIDES, layout)


@exercise(FORWARD, kind="numerics")
def test_offsets_beyond_what_an_int32_holds(check, rng):
    drawn = draw(rng, rng.integers(40, 90), rng.integers(40, 90), batch=2, heads=2, dim=16)
    check(drawn, False, layouts.FAR_CAUSE, dict.fromkeys("qkv", layouts.FAR), where="interpret")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(check, rng, is_causal):
    group, heads = rng.integers(2, 4), rng.integers(2, 3)
    drawn = draw(rng, rng.integers(20, 80), rng.integers(20, 80), batch=2, heads=heads, group=group, dim=16)
    check(drawn, is_causal, f"query head h uses key head h // {group}")


@exercise(FORWARD, kind="numerics")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_logits_fifty_times_larger(check, rng, dtype):
    drawn = draw(rng, rng.integers(60, 140), rng.integers(60, 140), dtype=dtype, scale=50.0, dim=16)
    check(drawn, rng.choice([False, True]), "subtract the running maximum")


@exercise(FORWARD, kind="numerics")
def test_thousands_of_keys_are_summed_in_float32(check, rng):
    q, k, v, do = draw(rng, 8, 3000, batch=1, heads=1, dim=16, dtype="float16", scale=1 / 64)
    got = check((q, k, v + 1, do), False, "keep m, l and acc in float32")
    error = (got["lse"].double() - got["want"]["lse"]).abs().max().item()
    assert error <= 1e-4, f"lse is off by {error:.1e} after 3,000 keys: keep the sum in float32"
    judged.check_rounded_once(got["o"], got["want"]["o"], "o of 3,000 keys", "lse is right, so keep acc in float32")


@exercise(FORWARD, kind="numerics")
def test_wrong_shapes_and_dtypes_are_refused(run, rng, where):
    good, f32 = [1, 2, 8, 16], ["float32"] * 3
    for shapes, dtypes in (
        ([good, [1, 2, 8, 32], [1, 2, 8, 32]], f32), ([good, good, [1, 2, 9, 16]], f32),
        ([good, [1, 3, 8, 16], [1, 3, 8, 16]], f32), ([good, [2, 2, 8, 16], [2, 2, 8, 16]], f32),
        ([[1, 1, 8, 264]] * 3, f32), ([[1, 2, 8, 0]] * 3, f32), ([good, *[[1, 2, 0, 16]] * 2], f32),
        ([[1, 2, 0, 16], good, good], f32), ([[0, 2, 8, 16]] * 3, f32), ([good] * 3, ["float16", "float16", "float32"]),
        ([good, *[[1, 0, 8, 16]] * 2], f32), ([good] * 3, ["float32", "float16", "float16"]),
        ([good] * 3, ["float64"] * 3),
    ):  # fmt: skip
        tensors = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        (raised,) = run(refused, "impl.flash_attention.triton_forward.attention_forward", [tensors])
        assert raised == "ValueError", f"{raised} was raised for {shapes} of {dtypes}, expected ValueError"


@exercise(FORWARD, kind="property")
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_kernel_does_the_work(run, check, rng, is_causal, where):
    drawn = draw(rng, rng.integers(257, 300), rng.integers(257, 300), batch=1, heads=1, group=2, dim=24)
    layout = dict.fromkeys("qkv", "columns first")
    got = check(drawn, is_causal, layout=layout, keep=True)
    judged.check_single_launch(got)
    if where == "interpret" and is_causal:
        judged.check_compiles("forward", run, got, drawn, is_causal, layout)


@exercise(FORWARD, kind="property")
def test_programs_share_the_queries(check, rng):
    """A single program would process all queries alone, without parallelism."""
    (launch,) = check(draw(rng, 512, 512, batch=1, heads=2, dim=16), False, keep=True)["launches"]
    programs = math.prod(launch[1])
    assert programs >= 2 * 512 // 128, f"a grid of {launch[1]} for 2 heads of 512 queries: a program a tile of queries"


@exercise(FORWARD, kind="property")
@pytest.mark.parametrize("kind", ["square", "more keys", "more queries"])
def test_tiles_above_the_diagonal_are_never_read(check, rng, kind):
    """Counted by address in the interpreter: a store of o covers at most BLOCK_M rows, a load of k at most BLOCK_N."""
    n, heads = rng.integers(257, 300), rng.integers(1, 2)
    queries, keys = n + 130 * (kind == "more queries"), n + 130 * (kind == "more keys")
    drawn = draw(rng, queries, keys, batch=1, heads=heads, dim=16, dtype="float16")
    got = check(drawn, True, keep=True, where="interpret")
    judged.check_no_tile_above_the_diagonal(got, queries, keys)
    if got["own"]:  # keys beyond `seen` lie in protected memory; a stand-in for key_range reads all keys
        seen = n + MAX_ROWS
        drawn = draw(rng, n, seen + 300, batch=1, heads=1, dim=16, dtype="float16")
        check(drawn, True, layout=dict.fromkeys("kv", f"{layouts.WALLED}{seen}"), where="interpret")
