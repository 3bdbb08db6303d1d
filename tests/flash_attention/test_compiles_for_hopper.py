"""The autograd function, and its kernels compiled for GPUs that need not be present.

Must hold: gradients through autograd are those of attention; little is saved for backward; the same kernels compile at
the benchmark's shapes in bfloat16 for sm_80, sm_90 and sm_100, spill at most SPILLED bytes per thread, and use tensor
cores. Typical fakes: other kernels for compiling than for computing (caught by comparing sources, and the programs
compiled for bfloat16 and float16); tiles so small that nothing spills and no tensor core is used (caught by counting
instructions in the PTX); torch's attention in backward (caught by recording operators).
"""

import pytest

from lab.harness import layouts
from lab.harness.judge import close, measured
from lab.harness.pytest_plugin import exercise

from . import probes_kernels as probes
from .oracles import ALLOWED, MODES, attention, draw, gradients, needs_triton

COMPILES = "flash_attention.compiles_for_hopper"
COMPILE_S = 240.0  # three kernels, one to three seconds each on an idle core
REGISTERS = 255  # the most that a thread can have
SPILLED = 64  # bytes per thread; on an H200 the fastest kernel spilled 48
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}
pytestmark = needs_triton


@exercise(COMPILES, kind="property")
@pytest.mark.parametrize("where", MODES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_through_autograd(run, rng, expect, is_causal, where):
    in_dtype = "float16" if is_causal else "float32"
    q, k, v, do = draw(rng, rng.integers(30, 90), rng.integers(30, 90), group=2, dim=16, dtype=in_dtype)
    layout = {**layouts.draw(rng, q=q, k=k, v=v)[1], "do": "columns first"}
    got, what = run(probes.autograd, q, k, v, do, is_causal, where, layout, triton=where), layouts.listed(layout)
    assert got["o"].dtype == q.dtype, f"o is {got['o'].dtype}, q is {q.dtype}"
    o, plain = (expect(attention, q, k, v, is_causal, dtype)["o"] for dtype in ("float64", in_dtype))
    close(got["o"], o, plain, f"o, {in_dtype}, in memory: {what}", factor=6, dims="batch, head, query, dim")
    want, yardstick = (expect(gradients, q, k, v, do, is_causal, dtype) for dtype in ("float64", in_dtype))
    for name in ("dq", "dk", "dv"):
        close(
            got[name], want[name], yardstick[name], f"{name} through autograd, {in_dtype}, in memory: {what}", factor=8,
            dims=f"batch, head, {'query' if name == 'dq' else 'key'}, dim",
        )  # fmt: skip


@exercise(COMPILES, kind="property")
@pytest.mark.parametrize("where", MODES)
def test_three_kernels_do_the_work(run, rng, where):
    q, k, v, do = draw(rng, rng.integers(60, 120), rng.integers(60, 120), dim=16)
    got = run(probes.autograd, q, k, v, do, True, where, triton=where)
    for record, phase in ((got["forward"], "forward"), (got, "backward")):
        other = sorted({*record["operators"]} - ALLOWED)
        assert not other, (
            f"torch ran {', '.join(other)} in {phase}, beside {len(got['launches'])} launches: allocation, views and "
            "casts are its part"
        )
    names, forward = [name for name, _ in got["launches"]], len(got["forward"]["launches"])
    assert (forward, len(names)) == (1, 3), (
        f"{forward} launches in forward, {len(names)} in all, expected 1 and 3: {', '.join(names)}"
    )


@exercise(COMPILES, kind="property")
def test_what_is_kept_for_backward_grows_with_the_length(run, rng):
    q, k, v, do = draw(rng, n := rng.integers(200, 260), n, batch=1, heads=1, dim=16)
    got = run(probes.autograd, q, k, v, do, False, "interpret")
    limit = sum(x.numel() * 4 for x in (q, k, v, q)) + q.numel() // q.shape[-1] * 4
    assert got["saved_bytes"] <= limit, (
        f"{got['saved_bytes']:,} bytes are kept for backward; q, k, v, o and lse have {limit:,}"
    )


def check(run, *wanted):
    """Compile for each (arch, dim, is_causal, queries, dtype) in parallel; judge and return the kernels of each."""
    ranks = {"world": len(wanted)} if len(wanted) > 1 else {}
    compiled = run(probes.compiled, *wanted, triton="native", timeout=COMPILE_S, **ranks)
    compiled = compiled if ranks else [compiled]
    for kernels, request in zip(compiled, wanted, strict=True):
        judge(kernels, *request)
    return compiled


def judge(kernels, arch: int, dim: int, is_causal: bool, queries: int, dtype: str):
    where = f"for sm_{arch}, {dtype}, dim {dim}, {queries:,} queries{', causal' * is_causal}"
    assert len(kernels) == 3, f"{len(kernels)} kernels {where}, expected one forward and two backward"
    target = f"sm_{arch}, dim {dim}"  # causal and full share a name: the value nearer to the bound is shown
    spilled = max(k["spilled"] for k in kernels)
    measured(f"bytes that a kernel spills, {target}", spilled, SPILLED, "bytes", at_most=True)
    for kernel in kernels:
        measured(f"registers of {kernel['name']}, {target}", kernel["registers"], REGISTERS, at_most=True)
        what = f"{kernel['name']} {where} ({kernel['registers']} registers, {kernel['warps']} warps)"
        assert kernel["spilled"] <= SPILLED, (
            f"{what} spills {kernel['spilled']} bytes a thread, expected at most {SPILLED}: fewer rows in a tile, more "
            "warps, or fewer stages"
        )
        assert kernel[TENSOR_CORES[arch]] > 0, (
            f"{what} has no {TENSOR_CORES[arch]} instruction: are its tiles too small?"
        )
        assert kernel["shared"] <= {80: 163, 90: 227, 100: 227}[arch] * 1024, (
            f"{what} wants {kernel['shared']:,} bytes of shared memory: more than a program may have"
        )


@exercise(COMPILES, kind="property", triton="native")
def test_on_hopper_at_dim_128(run):
    check(run, (90, 128, False, 8192, "bfloat16"), (90, 128, True, 8192, "bfloat16"))


@exercise(COMPILES, kind="property", triton="native")
def test_on_hopper_at_dim_64(run, rng):
    check(run, (90, 64, rng.choice([False, True]), 2 ** rng.integers(9, 14), "bfloat16"))


@exercise(COMPILES, kind="property", triton="native")
def test_on_the_generations_before_and_after(run, rng):
    check(run, *((arch, rng.choice([64, 128]), rng.choice([False, True]), 8192, "bfloat16") for arch in (80, 100)))


@exercise(COMPILES, kind="property", triton="native")
def test_the_kernels_that_compute_are_those_that_compile(run, rng):
    q, k, v, do = draw(rng, 70, 80, dim=64, dtype="float16")
    interpreted = sorted(run(probes.autograd, q, k, v, do, True, "interpret")["sources"])
    in_float16, in_bfloat16 = check(run, *((90, 64, True, 8192, dtype) for dtype in ("float16", "bfloat16")))
    for kernels in (in_float16, in_bfloat16):
        compiled = sorted(kernel["source"] for kernel in kernels)
        assert interpreted == compiled, "the interpreter ran other kernels than those that compile for a GPU"
    other = {kernel["program"] for kernel in in_bfloat16} - {kernel["program"] for kernel in in_float16}
    names = [kernel["name"] for kernel in in_bfloat16 if kernel["program"] in other]
    assert not names, (
        f"{', '.join(names)}: another program in bfloat16 than in float16, the dtype in which its numbers are judged"
    )
