"""Bytes, arithmetic intensity, the roofline bound, and MFU.

Must hold: bytes are those of the real model's products: each operand and each result once. The bound is the larger of
two times, and its side is named. Typical fakes: bytes of the weights only (caught because activations are larger here);
always the same side (caught by devices on both sides of every layer); running the model (caught by a million layers,
where creating a module raises).
"""

import pytest

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_counting as probes
from .test_flops import CASES, DIRECTIONS, NAMES, PATIENCE_S, SQUARES, TOLERANCE, draw

ROOFLINE = "benchmarking.roofline"


@exercise(ROOFLINE, kind="numerics")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_operands_and_results(run, rng, case, dtype):
    sizes, batch, context = draw(rng, case)
    got = run(probes.bytes_moved, sizes, batch, context, dtype)
    want = run(probes.counted, sizes, batch, context, dtype)["bytes"]
    assert set(got) == set(NAMES), f"expected the layers {', '.join(NAMES)}, got {', '.join(sorted(got))}"
    for name in NAMES:
        for direction, word in enumerate(DIRECTIONS):
            err = got[name][direction] / want[name][direction] - 1
            assert abs(err) <= TOLERANCE, (
                f"{name}, {word}, of {sizes}, batch {batch}, context {context}, {dtype}: got "
                f"{got[name][direction]:,} bytes, a run moves {want[name][direction]:,} ({err:+.1%}): both factors and "
                "the result, each once; backward is two such products"
            )


@exercise(ROOFLINE, kind="numerics")
@pytest.mark.parametrize("side", ["compute", "memory", "between"])
def test_the_bound_is_the_larger_of_two_times(run, rng, side):
    sizes, batch, context = draw(rng, rng.choice(list(CASES)))
    real = run(probes.counted, sizes, batch, context, "bfloat16")
    flops = {n: [f / (2 if n in SQUARES else 1) for f in real["flops"][n]] for n in NAMES}
    ridges = sorted(flops[n][0] / real["bytes"][n][0] for n in NAMES)
    ridge = {"compute": ridges[0] / 2, "memory": ridges[-1] * 2, "between": (ridges[4] + ridges[5]) / 2}[side]
    bandwidth = rng.uniform(1e11, 4e12)
    peaks = (ridge * bandwidth, bandwidth)
    got = run(probes.roofline, sizes, batch, context, "bfloat16", peaks)
    for name in NAMES:
        for direction, word in enumerate(DIRECTIONS):
            f, b = flops[name][direction], real["bytes"][name][direction]
            compute, memory = f / peaks[0], b / peaks[1]
            bound = got[f"{name} {word}"]
            wanted = {"flops": f, "bytes": b, "intensity": f / b, "seconds": max(compute, memory)}
            for field, number in wanted.items():
                assert abs(bound[field] / number - 1) <= TOLERANCE, (
                    f"{name} {word}: {field} {bound[field]:.4g}, expected {number:.4g}; compute takes {compute:.4g} s, "
                    f"memory {memory:.4g} s, both go on at once, so the longer one counts"
                )
            tied = abs(compute / memory - 1) <= 2 * TOLERANCE
            assert tied or bound["by"] == ("compute" if compute > memory else "memory"), (
                f"{name} {word}: bound by {bound['by']!r}, compute takes {compute:.4g} s, memory {memory:.4g} s"
            )


@exercise(ROOFLINE, kind="numerics")
def test_on_the_ridge_arithmetic_binds(run, rng):
    sizes, batch, context = draw(rng, rng.choice(list(CASES)))
    bounds = run(probes.roofline, sizes, batch, context, "bfloat16", (1.0, 1.0))
    name = f"{rng.choice(NAMES)} forward"
    f, b = float(bounds[name]["flops"]), float(bounds[name]["bytes"])
    got = run(probes.roofline, sizes, batch, context, "bfloat16", (f, b))[name]["by"]
    assert got == "compute", f"{name}: its intensity is the device's ridge to the last bit, and it is bound by {got!r}"


@exercise(ROOFLINE, kind="numerics")
def test_mfu_is_the_share_of_the_peak(run, rng):
    step, seconds, peak = rng.uniform(1e12, 1e15), rng.uniform(0.1, 3), rng.uniform(1e14, 1e15)
    got = run(probes.mfu, step, seconds, (peak, 1e12))
    want = step / seconds / peak
    assert abs(got / want - 1) < 1e-6, f"{step:.4g} FLOPs in {seconds:.3g} s at a peak of {peak:.4g}: {got}, not {want}"


@exercise(ROOFLINE, kind="property")
def test_a_larger_batch_moves_products_towards_compute_and_attention_not_at_all(run, rng):
    sizes, _, context = draw(rng, "short context")
    one, many = (run(probes.roofline, sizes, batch, context, "float32", (1e14, 1e12)) for batch in (1, 64))
    for name in NAMES:
        before, after = (bounds[f"{name} forward"]["intensity"] for bounds in (one, many))
        text = f"{name}: intensity {before:.4g} at batch 1, {after:.4g} at 64"
        if name in SQUARES:
            measured(f"{name}: intensity at batch 64 over batch 1", after / before, 1, "times")
            assert abs(after / before - 1) <= TOLERANCE, f"{text}: each sequence brings its own keys"
        else:
            assert after > 1.05 * before, f"{text}: the weights are read once for all"


@exercise(ROOFLINE, kind="property")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_million_layers_are_counted_without_a_model(run, rng, dtype):
    sizes, batch, context = draw(rng, rng.choice([*CASES]))
    few, many = sizes["layers"], rng.integers(10**6, 2 * 10**6)
    want = run(probes.counted, sizes, batch, context, dtype)["bytes"]
    got = run(probes.bytes_moved, {**sizes, "layers": many}, batch, context, dtype, True, timeout=PATIENCE_S)
    for name in NAMES:
        blocks, run_layers = (1, 1) if name == "head" else (many, few)
        for direction, word in enumerate(DIRECTIONS):
            expected = want[name][direction] * blocks // run_layers
            assert got[name][direction] == expected, (
                f"{name}, {word}, of {many:,} layers, {dtype}: got {got[name][direction]:,} bytes, a run of {few} "
                f"moves {want[name][direction]:,}, which makes {expected:,}, exactly"
            )
