"""Checks of both weighted-sum kernels: y = x w, and its gradients dx = dy wᵀ and dweight = dy x."""

import torch
from torch import Tensor

from lab.harness import layouts
from lab.harness.judge import close

from . import probes_steps as probes
from .oracles import ALLOWED, check_each

DTYPES = {"float32": torch.float32, "float16": torch.float16}  # the interpreter computes bfloat16 wrongly
DIMS = {"y": "row", "dx": "row, column", "dweight": "column"}
UNWRITTEN = "NaN is what no program wrote, or lies between strided elements. Are there "


def draw(rng, names: str, rows: int, columns: int, dtype=torch.float32, lay=layouts.draw) -> dict:
    """Draw a case. names: the tensors, "x weight" or "x weight dy". lay: function that draws their memory layouts."""
    shapes = {"x": (rows, columns), "weight": (columns,), "dy": (rows,)}
    return with_layouts(rng, lay, **{name: rng.normal(*shapes[name], dtype=dtype) for name in names.split()})


def with_layouts(rng, lay=layouts.draw, **operands: Tensor) -> dict:
    operands, drawn = lay(rng, **operands)
    return {**operands, "layouts": drawn}


def odd_sizes(rng) -> list[tuple[int, int]]:
    """(rows, columns): not divisible by any tile, smaller than a tile, and 1."""
    odd = [(rng.integers(17, 150), rng.integers(65, 300)) for _ in range(3)]
    few = [(rng.integers(2, 9), rng.integers(70, 200)), (rng.integers(33, 90), rng.integers(2, 9))]
    return odd + few + [(1, 1), (1, rng.integers(3, 300)), (rng.integers(3, 90), 1)]


def sums(x: Tensor, weight: Tensor, dy: Tensor | None = None) -> dict[str, Tensor]:
    return {"y": x @ weight} if dy is None else {"dx": dy[:, None] * weight, "dweight": dy @ x}


def check(run, cases: list[dict], strides: str, tiles: str) -> None:
    """Check all cases. strides, tiles: hints for a wrong value, and for a value that was never written."""
    check_each(run, probes.weighted_sums, cases, lambda case, got: _judge(case, got, strides, tiles))


def _judge(case: dict, got: dict, strides: str, tiles: str) -> None:
    operands = [case[name] for name in ("x", "weight", "dy") if name in case]
    x, forward = case["x"], "dy" not in case
    label = f"of x {tuple(x.shape)}, {x.dtype}, in memory: {layouts.listed(case['layouts'])}"
    want, plain = (sums(*(t.to(dtype) for t in operands)) for dtype in (torch.float64, torch.float32))
    for name in want:
        hint = "y in x's" if forward else "it in the input's"
        assert got[name].dtype == x.dtype, f"{name} {label} is {got[name].dtype}: return {hint} dtype"
    for name, value in want.items():
        is_far = layouts.FAR in case["layouts"].values()
        cause = f"{UNWRITTEN}{tiles}?" if got[name].isnan().any() else strides
        close(
            got[name], value, plain[name].to(x.dtype), f"{name} {label}", dims=DIMS[name],
            cause=layouts.FAR_CAUSE if is_far else cause, rounded_once=True,
        )  # fmt: skip


def check_single_launch(got: dict) -> None:
    """Assert that one launch did all the work."""
    assert len(got["launches"]) == 1, f"expected one kernel launch, saw {len(got['launches'])}: {got['launches']}"
    other = sorted(set(got["operators"]) - ALLOWED)
    assert not other, (
        f"beside the launch torch computed {', '.join(other)}: each is a kernel of its own on a GPU; allocation, "
        "views and casts are not"
    )


def check_accesses(got: dict, inputs: str, results: str) -> None:
    """Assert that the kernel reads all inputs and writes nothing but all results."""
    for names, verb, counts in ((inputs, "loaded", got["unread"]), (results, "stored", got["unwritten"])):
        for name, missing in zip(names.split(), counts, strict=True):
            assert not missing, f"{missing} elements of {name} were never {verb} by a kernel"
    assert not got["written_inputs"], f"{got['written_inputs']} elements of the inputs were stored to"
    assert got["contiguous"], f"{results}: expected contiguous results, whatever the strides of the inputs"


def check_independent(got: dict) -> None:
    assert not got["raced"], (
        f"{got['raced']} elements are stored by one program and touched by another: programs run at the same time on a "
        "GPU, so that additions are lost; let one program own each element of a result"
    )


def cancelling(rng, pairs: int, rows: int) -> tuple[Tensor, Tensor]:
    """x (rows, 2 · pairs) and w (2 · pairs). Both products of a pair exceed 65,504 in size; their sum is small."""
    a = rng.normal(rows, pairs).sign() * (400 + rng.normal(rows, pairs).abs())
    w = rng.normal(pairs).sign() * (300 + 10 * rng.normal(pairs).abs())
    x = torch.stack([a, a + rng.normal(rows, pairs)], -1).flatten(1)
    return x.half(), torch.stack([w, -w], -1).flatten().half()


def check_no_overflow(got: Tensor, name: str) -> None:
    assert torch.isfinite(got).all(), (
        f"{name} is not finite where products exceed 65,504 and sums do not: convert tiles to float32 before "
        "multiplying"
    )
