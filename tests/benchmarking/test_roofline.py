"""Bytes, intensity, the bound, and what share of the peak a step reached.

What must be true: bytes are those of the real model's products, operands and results once each; the bound is the
larger of two times, and its side is named. How it would be faked: bytes of the weights alone (activations weigh more
here); one side always (devices are drawn on both sides of every layer); running the model (a million layers, and no
module can be made).
"""

from __future__ import annotations

import pytest

from lab.harness.diagnose import harmless, in_parts
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_counting as probes
from .test_flops import CASES, NAMES, PATIENCE_S, WITHIN, draw

ROOFLINE = "benchmarking.roofline"
FLOPS = "benchmarking.flops"


@exercise(ROOFLINE, kind="numerics")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_operands_and_results(run, rng, case, dtype):
    sizes, batch, context = draw(rng, case)
    got = run(probes.bytes_moved, sizes, batch, context, dtype, replace=[FLOPS])
    want = run(probes.counted, sizes, batch, context, dtype)["bytes"]
    assert set(got) == set(NAMES), f"expected the layers {', '.join(NAMES)}, got {', '.join(sorted(got))}"
    for name in NAMES:
        for direction in (0, 1):
            off = got[name][direction] / want[name][direction] - 1
            assert abs(off) <= WITHIN, (
                f"{name}, {('forward', 'backward')[direction]}, of {sizes}, batch {batch}, context {context}, {dtype}: "
                f"got {got[name][direction]:,} bytes, a run moves {want[name][direction]:,} ({off:+.1%}): "
                f"{because(got, name, sizes, batch, context, dtype)}"
                f"{in_parts(got[name][0], want[name][0], parts(name, sizes, batch, context, dtype))}"
            )


def parts(name: str, sizes: dict, batch: int, context: int, dtype: str) -> dict[str, int]:
    """Bytes of one product's matrices, over all blocks, in forward."""
    size = {"float32": 4, "bfloat16": 2}[dtype]
    if name not in ("scores", "values"):
        called = ("the rows that go in", "the weight", "the result")
        return {what: size * n for what, n in zip(called, factors(sizes, batch, context)[name], strict=True)}
    head = size * sizes["layers"] * batch * context * sizes["width"] // sizes["heads"]
    heads, shared = sizes["heads"], sizes["kv_heads"]
    return {
        "what repeating keys or values from kv_heads to heads adds": (heads - shared) * head,
        "q, or k repeated to heads": heads * head,
        "k of kv_heads": shared * head,
        "the matrix of (context, context)": size * sizes["layers"] * batch * heads * context**2,
    }


@harmless
def because(got: dict, name: str, sizes: dict, batch: int, context: int, dtype: str) -> str:
    """What was counted of all products, if it is one thing; of attention, whether its matrix was."""
    size = {"float32": 4, "bfloat16": 2}[dtype]
    linear = factors(sizes, batch, context)
    for other in {1, 2, 4, 8} - {size}:
        if all(abs(got[name][0] / (other * sum(of)) - 1) <= WITHIN for name, of in linear.items()):
            return f"so with {other} bytes an element: {dtype} has {size}"
    matrix = size * sizes["layers"] * batch * sizes["heads"] * context**2
    if name in ("scores", "values") and got[name][0] < matrix:
        return f"the matrix of (context, context) is {matrix:,} alone: it is written, and read"
    for parts in range(1, 7):
        which = [bool(parts & bit) for bit in (1, 2, 4)]
        found = [
            abs(got[name][0] / (size * max(1, sum(n for n, w in zip(of, which, strict=True) if w))) - 1) <= WITHIN
            for name, of in linear.items()
        ]
        if all(found):
            counted = [word for word, w in zip(("what goes in", "the weight", "the result"), which, strict=True) if w]
            return f"of all linear layers {' and '.join(counted)} alone, forward; both factors and the result count"
    return "both factors and the result, each once; backward is two such products"


def factors(sizes: dict, batch: int, context: int) -> dict[str, tuple[int, int, int]]:
    """Elements of (what goes in, the weight, the result) of each linear layer, over all layers."""
    n, width = batch * context, sizes["width"]
    shared = width * sizes["kv_heads"] // sizes["heads"]
    shapes = {
        "q_proj": (width, width), "k_proj": (width, shared), "v_proj": (width, shared), "o_proj": (width, width),
        "gate_proj": (width, sizes["hidden"]), "up_proj": (width, sizes["hidden"]),
        "down_proj": (sizes["hidden"], width), "head": (width, sizes["vocabulary"]),
    }  # fmt: skip
    blocks = {name: 1 if name == "head" else sizes["layers"] for name in shapes}
    return {name: (blocks[name] * n * i, blocks[name] * i * o, blocks[name] * n * o) for name, (i, o) in shapes.items()}


@exercise(ROOFLINE, kind="numerics")
@pytest.mark.parametrize("side", ["compute", "memory", "between"])
def test_the_bound_is_the_larger_of_two_times(run, rng, side):
    sizes, batch, context = draw(rng, rng.choice(list(CASES)))
    real = run(probes.counted, sizes, batch, context, "bfloat16")
    flops = {n: [f / (2 if n in ("scores", "values") else 1) for f in real["flops"][n]] for n in NAMES}
    ridges = sorted(flops[n][0] / real["bytes"][n][0] for n in NAMES)
    ridge = {"compute": ridges[0] / 2, "memory": ridges[-1] * 2, "between": (ridges[4] + ridges[5]) / 2}[side]
    bandwidth = rng.uniform(1e11, 4e12)
    peaks = (ridge * bandwidth, bandwidth)
    got = run(probes.roofline, sizes, batch, context, "bfloat16", peaks, replace=[FLOPS])
    for name in NAMES:
        for direction, word in enumerate(("forward", "backward")):
            f, b = flops[name][direction], real["bytes"][name][direction]
            times = {"compute": f / peaks[0], "memory": b / peaks[1]}
            what = f"{name} {word}"
            intensity, seconds, by = (got[what][field] for field in ("intensity", "seconds", "by"))
            assert abs(intensity / (f / b) - 1) <= WITHIN, (
                f"{what}: intensity {intensity:.4g}, FLOPs a byte are {f / b:.4g}"
            )
            assert abs(seconds / max(times.values()) - 1) <= WITHIN, (
                f"{what}: {seconds:.4g} s, compute takes {times['compute']:.4g} s, memory {times['memory']:.4g} s: "
                "both go on at once, so the longer one counts"
            )
            near = abs(times["compute"] / times["memory"] - 1) <= 2 * WITHIN
            assert near or by == max(times, key=times.get), (
                f"{what}: bound by {by!r}, compute takes {times['compute']:.4g} s, memory {times['memory']:.4g} s"
            )


@exercise(ROOFLINE, kind="numerics")
def test_on_the_ridge_arithmetic_binds(run, rng):
    sizes, batch, context = draw(rng, rng.choice(list(CASES)))
    free = run(probes.roofline, sizes, batch, context, "bfloat16", (1.0, 1.0), replace=[FLOPS])
    name = f"{rng.choice(NAMES)} forward"
    f, b = float(free[name]["flops"]), float(free[name]["bytes"])
    by, above = (  # both take one second; arithmetic takes two
        run(probes.roofline, sizes, batch, context, "bfloat16", peaks, replace=[FLOPS])[name]["by"]
        for peaks in ((f, b), (f / 2, b))
    )
    assert by == "compute", (
        f"{name}: its intensity is the device's ridge to the last bit, and it is bound by {by!r}, expected 'compute': "
        f"{'this tie alone is wrong' if above == 'compute' else f'at twice the ridge by {above!r}, too'}"
    )


@exercise(ROOFLINE, kind="numerics")
def test_mfu_is_the_share_of_the_peak(run, rng):
    step, seconds, peak = rng.uniform(1e12, 1e15), rng.uniform(0.1, 3), rng.uniform(1e14, 1e15)
    got = run(probes.mfu, step, seconds, (peak, 1e12), replace=[FLOPS])
    want = step / seconds / peak
    upside = ": peak / (FLOPs / seconds), upside down" if abs(got * want - 1) < 1e-6 else ""
    assert abs(got / want - 1) < 1e-6, (
        f"{step:.4g} FLOPs in {seconds:.3g} s at a peak of {peak:.4g}: {got}, not {want}{upside}"
    )


@exercise(ROOFLINE, kind="property")
def test_a_larger_batch_moves_products_towards_compute_and_attention_not_at_all(run, rng):
    sizes, _, context = draw(rng, "short context")
    intensity = {}
    for batch in (1, 64):
        real = run(probes.counted, sizes, batch, context, "float32")
        got = run(probes.roofline, sizes, batch, context, "float32", (1e14, 1e12), replace=[FLOPS])
        for name in NAMES:
            want = real["flops"][name][0] / real["bytes"][name][0] / (2 if name in ("scores", "values") else 1)
            intensity[name, batch] = got[f"{name} forward"]["intensity"]
            assert abs(intensity[name, batch] / want - 1) <= WITHIN, (
                f"{name}: intensity {intensity[name, batch]:.4g} at batch {batch}, FLOPs a byte are {want:.4g}"
            )
    for name in NAMES:
        before, after = intensity[name, 1], intensity[name, 64]
        if name in ("scores", "values"):
            measured(f"{name}: intensity at batch 64 over batch 1", after / before, 1, "times")
            assert abs(after / before - 1) <= WITHIN, (
                f"{name}: intensity {before:.4g} at batch 1, {after:.4g} at 64: each sequence brings its own keys"
            )
        else:
            assert after > 1.05 * before, (
                f"{name}: intensity {before:.4g} at batch 1, {after:.4g} at 64: the weights are read once for all"
            )


@exercise(ROOFLINE, kind="property")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_million_layers_are_counted_without_a_model(run, rng, dtype):
    sizes, batch, context = draw(rng, rng.choice([*CASES]))
    few, many = sizes["layers"], rng.integers(10**6, 2 * 10**6)
    want = run(probes.counted, sizes, batch, context, dtype)["bytes"]
    got = run(
        probes.bytes_moved, {**sizes, "layers": many}, batch, context, dtype, True, replace=[FLOPS], timeout=PATIENCE_S
    )
    for name in NAMES:
        for direction, word in enumerate(("forward", "backward")):
            expected = want[name][direction] * (1 if name == "head" else many) // (1 if name == "head" else few)
            assert got[name][direction] == expected, (
                f"{name}, {word}, of {many:,} layers, {dtype}: got {got[name][direction]:,} bytes, a run of {few} "
                f"moves {want[name][direction]:,}, which makes {expected:,}, exactly"
            )
