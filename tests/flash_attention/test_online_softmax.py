"""The statistics of softmax in one pass over tiles.

Must hold: maximum, normaliser and log-sum-exp are those of whole rows, in float32 arithmetic, for tiles of any width,
for masked scores and for large ones; each tile is used when it comes, and then released. Typical fakes: collect the
tiles, or copies of them, then reduce (caught by the process's memory peak in runs of many tiles, whose numbers are
judged); read the tiles twice (caught because a generator is then empty); no running maximum (caught by logits × 50 and
× 10,000); a start from −10³⁰ or 0 instead of −inf (caught by rows that are fully masked).
"""

import math

import pytest
import torch

from lab.harness.judge import close, never_holds
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import Trace

from . import probes_steps as probes
from .oracles import DTYPES

ONLINE = "flash_attention.online_softmax"


def statistics(x, in_base_2: bool) -> dict:
    """Statistics of whole rows. in_base_2: as kernels compute them, with one more rounding, for the tolerance."""
    factor = math.log2(math.e) if in_base_2 else 1.0
    exp, log = (torch.exp2, torch.log2) if in_base_2 else (torch.exp, torch.log)
    x = x * factor
    m = x.amax(-1)
    normaliser = exp(x - m.masked_fill(m == -math.inf, 0.0)[..., None]).sum(-1)
    return {"maximum": m / factor, "normaliser": normaliser, "lse": (m + log(normaliser)) / factor}


def widths(rng, count: int, maximum: int) -> list[int]:
    return [rng.integers(1, maximum) for _ in range(count)]


def draw_many(rng, dtype: str) -> tuple:
    """Draw a tile and 600 factors. Each factor makes another tile; all tiles together take at least 32 MiB."""
    seed = rng.normal(rng.integers(60, 68), rng.integers(500, 520), dtype=DTYPES[dtype])
    return seed, [rng.integers(1, 32) / 8 for _ in range(600)]  # exact in every dtype


def check(run, tensors: list[torch.Tensor], splits: list[list[int]], generator: bool = True) -> None:
    tiles = [[t.contiguous() for t in x.split(split, dim=-1)] for x, split in zip(tensors, splits, strict=True)]
    cases = [{"tiles": each, "generator": generator} for each in tiles]
    for x, split, got in zip(tensors, splits, run(probes.softmax_statistics, cases), strict=True):
        judge(x, split, got)


def check_many(run, seed: torch.Tensor, factors: list[float]) -> Trace:
    """Check the statistics of many tiles; return the trace."""
    (trace,) = run.trace(probes.softmax_of_many, seed, factors)
    judge(torch.cat([seed * factor for factor in factors], -1), [seed.shape[-1]] * len(factors), *trace.values)
    return trace


def judge(x: torch.Tensor, split: list[int], got: dict) -> None:
    in_tiles = f"{len(split)} tiles" if len(split) > 20 else f"tiles of {', '.join(map(str, split))} columns"
    what = f"of {tuple(x.shape)} {x.dtype} in {in_tiles}"
    masked = x.amax(-1) == -math.inf
    want, yardstick = statistics(x.double(), False), statistics(x.float(), True)
    for name, empty in (("maximum", -math.inf), ("normaliser", 0.0), ("lse", -math.inf)):
        assert got[name].dtype == torch.float32, f"{name} {what} is {got[name].dtype}, expected float32"
        assert got[name].shape == masked.shape, (
            f"{name} {what}: expected shape {tuple(masked.shape)}, got {tuple(got[name].shape)}"
        )
        wrong = got[name][masked][got[name][masked] != empty]
        assert not wrong.numel(), (
            f"{name} {what}: a row of −inf alone gives {wrong[0].item()}, expected {empty}: "
            "the maximum starts at −inf, and where it is still −inf nothing may be subtracted: −inf − (−inf) is NaN"
        )
        close(
            got[name][~masked], want[name][~masked], yardstick[name][~masked], f"{name} {what}",
            factor=10.0 if len(split) > 20 else 3.0,  # hundreds of tiles are summed in another order
        )  # fmt: skip


@exercise(ONLINE, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_whole_rows(run, rng, dtype):
    """With so many columns, a sum in 16 bits drifts."""
    split = widths(rng, 12, 200)
    x = rng.normal(rng.integers(3, 20), sum(split), dtype=DTYPES[dtype])
    check(run, [x], [split])


@exercise(ONLINE, kind="numerics")
def test_tiles_may_be_of_any_widths_and_a_single_column(run, rng):
    splits = [[1], [1] * rng.integers(2, 9), [rng.integers(2, 90)], widths(rng, 5, 40), [1, rng.integers(20, 60), 1]]
    check(run, [rng.normal(rng.integers(1, 9), sum(s)) for s in splits], splits)


@exercise(ONLINE, kind="numerics")
def test_any_leading_dimensions_and_any_iterable(run, rng):
    splits = [widths(rng, 4, 30) for _ in range(4)]
    shapes = [[rng.integers(1, 4) for _ in range(dims)] for dims in range(4)]
    tensors = [rng.normal(*shape, rng.integers(5, 9), sum(s)) for shape, s in zip(shapes, splits, strict=True)]
    check(run, tensors, splits)
    check(run, tensors, splits, generator=False)


@exercise(ONLINE, kind="numerics")
def test_large_logits_in_any_order(run, rng):
    """The maximum rises with each tile, falls with each tile, or comes anywhere."""
    splits = [widths(rng, 6, 30) for _ in range(6)]
    rows = rng.integers(3, 9)
    tensors = [rng.normal(rows, sum(s)) * (50.0 if i < 3 else 1e4) for i, s in enumerate(splits)]
    for i in (0, 3):
        tensors[i], tensors[i + 1] = tensors[i].sort(-1).values, tensors[i + 1].sort(-1, descending=True).values
    check(run, tensors, splits)


@exercise(ONLINE, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_scores(run, rng, dtype):
    """−inf in the first tiles, in the middle, in the last, at random places, and in whole rows."""
    split = widths(rng, 5, 20)
    bounds = torch.tensor([0, *split]).cumsum(0).tolist()
    x = rng.normal(7, sum(split), dtype=DTYPES[dtype])
    x[0, : bounds[rng.integers(1, 3)]] = -math.inf
    x[1, bounds[2] : bounds[rng.integers(3, 4)]] = -math.inf
    x[2, bounds[4] :] = -math.inf
    x[3, rng.normal(sum(split)) > 0] = -math.inf
    x[4] = -math.inf
    x[5, :-1] = -math.inf
    hidden = torch.full((2, 3, sum(split)), -math.inf, dtype=DTYPES[dtype])
    check(run, [x, hidden], [split, split])


@exercise(ONLINE, kind="numerics")
def test_no_tiles_are_refused(run):
    for given, got in zip(("an empty list", "an empty generator"), run(probes.softmax_of_nothing), strict=True):
        assert got == "ValueError", f"{given}: expected ValueError, got {got}"


@exercise(ONLINE, kind="numerics")
def test_hundreds_of_tiles(run, rng):
    check_many(run, *draw_many(rng, rng.choice([*DTYPES])))


@exercise(ONLINE, kind="property")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_does_not_grow_with_the_number_of_tiles(run, rng, dtype):
    """Of the tiles already seen, only a maximum and a sum per row are needed."""
    seed, factors = draw_many(rng, dtype)
    many = check_many(run, seed, factors)
    few = check_many(run, seed, factors[:2])
    never_holds(
        many, few, f"keeping {len(factors)} tiles", seed.nbytes * len(factors), needs=8 * seed.numel() * 4,
        seen=lambda: run(probes.softmax_memory, seed, factors),
    )  # fmt: skip
