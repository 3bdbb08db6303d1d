"""Clipping by the global norm, and counting the samples and tokens of a step.

Must hold: the norm is that of all gradients as one vector, for any dtypes and sharding; it has the same bits on all
ranks; no needless message is sent. Typical fakes and mistakes: a norm per parameter, or of this rank's shards alone;
squares in the gradient's dtype (drawn float16 and float32 values overflow and underflow); a collective for replicated
gradients, which would count W times; one Python number read back per parameter; new gradient tensors, which the wrapper
does not know; counts that ignore padding, accumulation or other ranks.
"""

import math

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_clip as probes
from .probes_clip import FIELDS

CLIP = "ddp.clip_and_count"
GIVEN = {"list": "in a list", "twice": "each named twice", "generator": "from a generator"}
COUNTED = "padding is not counted, rows of nothing else neither; micro-batches and the ranks of the group all are"


def norm_of(gradients: list) -> float:
    """Return the norm of all gradients as one vector, in float64."""
    return math.sqrt(math.fsum(float(x) ** 2 for g in gradients if g is not None for x in g.double().flatten()))


def draw(rng, scale: float = 1.0, dtype: torch.dtype = torch.float32, parameters: int = 4) -> list:
    shapes = [[rng.integers(1, 6) for _ in range(rng.integers(0, 3))] for _ in range(parameters)]
    return [(rng.normal(*shape, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def check(got: dict, gradients: list, max_norm: float, what: str, covered: list | None = None, cause: str = "") -> None:
    """Assert norm and clipped gradients. covered: all gradients in the norm, if more than `gradients`."""
    norm = norm_of(gradients if covered is None else covered)
    assert got["returned"] == "torch.float64 ()", f"{what}: returned {got['returned']}, expected a float64 tensor ()"
    assert abs(float(got["norm"]) - norm) <= 1e-6 * norm, (
        f"{what}: the norm is {norm:.7g}, got {float(got['norm']):.7g}: {cause or 'of all gradients, before clipping'}"
    )
    scale = min(1.0, max_norm / norm) if norm else 1.0
    for i, (g, after) in enumerate(zip(gradients, got["gradients"], strict=True)):
        if g is None:
            assert after is None, f"{what}: gradient {i} was None and is not now"
            continue
        assert after.dtype == g.dtype, f"{what}: gradient {i} was {g.dtype} and is {after.dtype}"
        assert scale < 1 or torch.equal(after, g), (
            f"{what}: gradient {i} was changed, though the norm is {norm:.3g}: the factor is min(1, max_norm / norm)"
        )
        want = g.double() * scale
        cause = f"each is multiplied by {scale:.4g}, that is min(1, max_norm / norm)"
        close(after, want, want.to(g.dtype), f"{what}, gradient {i}", cause=cause)


@exercise(CLIP, kind="numerics")
def test_the_norm_is_of_all_gradients_as_one_vector(run, rng):
    cases = []
    for share in (0.01, 0.3, 0.999, 1.001, 5.0):
        gradients = draw(rng)
        gradients.insert(rng.integers(0, 4), None)
        cases.append({"gradients": gradients, "max_norm": share * norm_of(gradients)})
    cases += [{"gradients": draw(rng, scale), "max_norm": m} for scale in (1.0, 1e-20) for m in (1e3, math.inf)]
    for case, got in zip(cases, run(probes.clip, cases), strict=True):
        check(got, case["gradients"], case["max_norm"], f"max_norm {case['max_norm']:.4g}")


@exercise(CLIP, kind="numerics")
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(2e4, torch.float16), (1e-4, torch.float16), (300.0, torch.bfloat16), (1e25, torch.float32),
     (1e-30, torch.float32)],
)  # fmt: skip
def test_squares_neither_overflow_nor_vanish(run, rng, scale, dtype):
    gradients = [g.clamp(-3 * scale, 3 * scale) for g in [*draw(rng, scale, dtype), rng.normal(40).to(dtype) * scale]]
    norm = norm_of(gradients)
    cases = [{"gradients": gradients, "max_norm": share * norm} for share in (0.3, 1e-7 if scale == 2e4 else 0.6)]
    for case, got in zip(cases, run(probes.clip, cases), strict=True):
        check(
            got, gradients, case["max_norm"], f"{dtype} values of about {scale:g}",
            cause="squares are summed in float64, whatever the gradients' dtype",
        )  # fmt: skip


@exercise(CLIP, kind="numerics")
@pytest.mark.parametrize("given", ["list", "generator", "twice"])
def test_parameters_of_four_dtypes_come_once_or_are_named_twice(run, rng, given):
    dtypes = rng.shuffled([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    gradients = [g for dtype in dtypes for g in draw(rng, 1.0, dtype, 2)]
    (got,) = run(probes.clip, [{"gradients": gradients, "max_norm": 0.1, "given": given}])
    check(
        got, gradients, 0.1, f"four dtypes, {GIVEN[given]}",
        cause="a generator is used up after one pass; a tied parameter is one parameter",
    )  # fmt: skip


@exercise(CLIP, kind="numerics")
def test_nothing_to_clip(run):
    cases = [{"gradients": g, "max_norm": 0.5} for g in ([], [None, None], [torch.zeros(3), None, torch.zeros(2, 2)])]
    for case, got in zip(cases, run(probes.clip, cases), strict=True):
        check(got, case["gradients"], 0.5, f"gradients {case['gradients']}")


@exercise(CLIP, kind="numerics")
def test_a_max_norm_that_is_not_above_0_is_refused(run):
    limits = [0.0, -1.0, math.nan]
    for limit, error in zip(limits, run(probes.refused, limits), strict=True):
        assert error == "ValueError", f"max_norm {limit}: expected ValueError, got {error}"


def shards(rng, world: int) -> tuple[list, list]:
    """Draw whole gradients, and the pieces of each rank; with more than two ranks, one rank has no pieces."""
    full = draw(rng, parameters=2)
    pieces = [draw(rng, scale=rank + 1.0, parameters=rng.integers(1, 3)) for rank in range(world)]
    if world > 2:
        pieces[rng.integers(0, world - 1)] = rng.choice([[], [None]])
    return full, pieces


@exercise(CLIP, kind="numerics")
@pytest.mark.parametrize(("world", "groups"), [(1, []), (2, []), (3, []), (5, []), (4, [[0, 2], [1, 3]])])
def test_pieces_of_all_ranks_are_one_vector(run, rng, world, groups):
    """The first case has whole gradients and pieces, the second pieces alone."""
    drawn = [shards(rng, world), ([], shards(rng, world)[1])]
    cases = [[{"gradients": w, "sharded": p[r], "max_norm": 0.25} for w, p in drawn] for r in range(world)]
    ranks = run(probes.clip_sharded, cases, groups, world=world)
    for members in groups or [list(range(world))]:
        for i, (full, pieces) in enumerate(drawn):
            everything = [*full, *(g for r in members for g in pieces[r])]
            for rank in members:
                check(
                    ranks[rank][i], [*full, *pieces[rank]], 0.25,
                    f"rank {rank} of {members}, {len(full)} whole gradients", everything,
                    cause="the squares of pieces are summed over the group, those of whole gradients are not",
                )  # fmt: skip
                assert torch.equal(ranks[rank][i]["norm"], ranks[members[0]][i]["norm"]), (
                    f"the norm differs between rank {members[0]} and rank {rank}: replicas drift apart"
                )


@exercise(CLIP, kind="numerics")
@pytest.mark.parametrize(
    ("scale", "dtype", "given"),
    [(2e4, torch.float16, "list"), (1e-4, torch.float16, "twice"), (1e25, torch.float32, "generator")],
)
def test_squares_of_pieces_neither_overflow_nor_vanish(run, rng, scale, dtype, given):
    pieces = [[g.clamp(-3 * scale, 3 * scale) for g in draw(rng, scale, dtype)] for _ in range(2)]
    everything = [g for p in pieces for g in p]
    limit = 0.3 * norm_of(everything)
    cases = [[{"gradients": [], "sharded": p, "max_norm": limit, "given": given}] for p in pieces]
    for rank, (got,) in enumerate(run(probes.clip_sharded, cases, [], world=2)):
        check(
            got, pieces[rank], limit, f"rank {rank}, pieces in {dtype} of about {scale:g}, {GIVEN[given]}", everything,
            cause="squares are summed in float64, over ranks too; a piece that is named twice counts once",
        )  # fmt: skip


@exercise(CLIP, kind="numerics")
@pytest.mark.parametrize(
    ("where", "bad"), [("whole", math.inf), ("whole", math.nan), ("piece", -math.inf), ("piece", math.nan)]
)
def test_a_norm_that_is_not_finite_changes_nothing(run, rng, where, bad):
    world, full = 3, draw(rng, parameters=2)
    pieces = [draw(rng, parameters=2) for _ in range(world)]
    (full if where == "whole" else pieces[rng.integers(0, world - 1)])[0].view(-1)[0] = bad
    cases = [[{"gradients": full, "sharded": p, "max_norm": limit} for limit in (0.1, math.inf)] for p in pieces]
    for rank, results in enumerate(run(probes.clip_sharded, cases, [], world=world)):
        for got, case in zip(results, cases[rank], strict=True):
            what = f"rank {rank}, max_norm {case['max_norm']}, a {where} gradient holds {bad}"
            assert not math.isfinite(float(got["norm"])), (
                f"{what}: the norm is {float(got['norm'])}, expected inf or NaN"
            )
            for i, (g, after) in enumerate(zip([*full, *pieces[rank]], got["gradients"], strict=True)):
                assert torch.equal(g.nan_to_num(7.0), after.nan_to_num(7.0)), (
                    f"{what}: gradient {i} was changed, {g.flatten()[:3]} became {after.flatten()[:3]}; the caller "
                    "sees the norm and skips the step"
                )


@exercise(CLIP, kind="property")
def test_replicated_gradients_send_nothing_and_pieces_one_number(run, rng):
    world = 3
    full, pieces = shards(rng, world)
    cases = [[{"gradients": full, "sharded": s, "max_norm": 0.25} for s in (None, pieces[r], [])] for r in range(world)]
    for rank, trace in enumerate(run.trace(probes.clip_sharded, cases, [], world=world)):
        for i, (rows, want) in enumerate(zip(trace.cut(["case 0", "case 1", "case 2"]), (0, 1, 1), strict=True)):
            everything = [*full, *(g for p in pieces for g in p)] if i == 1 else None
            if i < 2:
                check(trace.values[i], [*full, *(cases[rank][i]["sharded"] or [])], 0.25, f"rank {rank}", everything)
            sends(
                rows, [["all_reduce", 1]] * want, f"rank {rank}, {'pieces' if want else 'whole gradients alone'}",
                "whole gradients are equal on all ranks already; of pieces, every rank adds one sum of squares",
            )  # fmt: skip


@exercise(CLIP, kind="property")
def test_clipping_scales_in_place_without_host_reads(run, rng):
    """The first case has whole gradients alone, the second whole gradients and pieces."""
    cases = [{"gradients": [*draw(rng), None], "sharded": s, "max_norm": 0.1} for s in (None, draw(rng))]
    for got in run(probes.clip_sharded, [cases], [], world=1)[0]:
        assert got["in_place"], (
            "a gradient is a new tensor: the wrapper's buffer, of which it was a view, is left behind"
        )
        assert not got["reads"], (
            f"the host waits for the device ({', '.join(got['reads'])}). Keep the norm a tensor, and choose the "
            "factor by torch.where and clamp, not by if"
        )


def targets(rng, ignore_index: int, micro_batches: int) -> list:
    """Draw micro-batches: rows of any length, padded at the end; some rows are all padding."""
    batches = []
    for _ in range(micro_batches):
        batch, context = rng.integers(1, 4), rng.integers(2, 9)
        t = rng.tokens(batch, context, vocabulary=50)
        for row in range(batch):
            t[row, rng.integers(0, context) :] = ignore_index
        batches.append(t)
    batches.append(torch.full((1, 3), ignore_index))
    return rng.shuffled(batches)


def counted(micro_batches: list, ignore_index: int) -> tuple[int, int]:
    rows = [[t for t in row if t != ignore_index] for m in micro_batches for row in m.tolist()]
    return sum(bool(row) for row in rows), sum(len(row) for row in rows)


@exercise(CLIP, kind="numerics")
@pytest.mark.parametrize(("world", "groups"), [(1, []), (2, []), (3, []), (4, [[0, 3], [1, 2]])])
def test_a_step_is_counted_over_micro_batches_and_ranks(run, rng, world, groups):
    cases = []
    for _ in range(world):
        drawn = [{"targets": targets(rng, i or -100, rng.integers(1, 3)), "ignore_index": i} for i in (None, -1)]
        cases.append([*drawn, {"targets": [], "ignore_index": None}])
    cases[0][2]["targets"] = targets(rng, -100, 2)  # only rank 0 has micro-batches
    ranks = run(probes.count, cases, groups, world=world)
    for members in groups or [list(range(world))]:
        for i in range(3):
            local = {r: counted(cases[r][i]["targets"], cases[r][i]["ignore_index"] or -100) for r in members}
            total = [sum(column) for column in zip(*local.values(), strict=True)]
            for r in members:
                (counts, types), want = ranks[r][i], [*local[r], *total]
                assert counts == want, (
                    f"rank {r} of {members}, {len(cases[r][i]['targets'])} micro-batches, ignore_index "
                    f"{cases[r][i]['ignore_index'] or -100}: ({', '.join(FIELDS)}) are {want}, got {counts}: {COUNTED}"
                )
                assert types == ["int"] * 4, f"counts are {types}, expected int"


@exercise(CLIP, kind="numerics")
def test_counts_are_exact_beyond_what_float32_counts(run, rng):
    """One token is expanded to more than 2²⁴ tokens: above 2²⁴, float32 has only even integers."""
    side = 4097 + 2 * rng.integers(0, 20)
    one = torch.ones(1, 1, dtype=torch.int64)
    cases = [
        [{"targets": [one], "ignore_index": None, "shape": shape}]
        for shape in ([side, side], [2, 2 * rng.integers(1, 9)])
    ]
    want = [side + 2, side**2 + 2 * cases[1][0]["shape"][1]]
    for rank, ((got, _),) in enumerate(run(probes.count, cases, [], world=2)):
        assert got[2:] == want, f"rank {rank}: {want} samples and tokens of all ranks, got {got[2:]}: count in int64"


@exercise(CLIP, kind="property")
def test_a_count_is_one_all_reduce_of_two_numbers(run, rng):
    for counts in ((3, 3), (1, 4)):  # if equal, a collective per micro-batch would not hang
        cases = [[{"targets": targets(rng, -100, m), "ignore_index": None}] for m in counts]
        total = sum(counted(case[0]["targets"], -100)[1] for case in cases)
        for rank, trace in enumerate(run.trace(probes.count, cases, [], world=2)):
            got = trace.values[0][0][3]
            assert got == total, f"rank {rank}: {got} tokens, expected {total}: {COUNTED}"
            what = f"rank {rank}, {len(cases[rank][0]['targets'])} micro-batches"
            sends(trace.cut(["case 0"])[0], [["all_reduce", 2]], what, "one message of two numbers, however many")
