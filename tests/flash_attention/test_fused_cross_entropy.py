"""Linear layer and cross entropy in one function, a few rows of logits at a time.

Must hold: loss and gradients are those of mean cross entropy, for chunks of any size and any incoming gradient, and no
matrix of rows × vocabulary ever exists. Typical fakes: compute all logits, or keep those of all chunks (caught by the
process's memory peak in runs whose numbers are judged); save more for backward than x and weight have (caught by many
losses that wait for backward); ignore the incoming gradient; sum the weight's gradient in 16 bits.
"""

import pytest
import torch

from lab.harness import layouts
from lab.harness.calls import metered, refused
from lab.harness.judge import close, never_holds
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import Trace

from . import probes_steps as probes
from .oracles import DTYPES, check_each

FUSED = "flash_attention.fused_cross_entropy"
APPLY = "impl.flash_attention.fused_cross_entropy.FusedCrossEntropy.apply"
ONE_BACKWARD = {"layouts": {}, "twice": False}  # for cases whose memory is measured
CAUSE = {
    "loss": "the mean over all rows of lse − logit of the target, in float32",
    "dx": "(softmax − one-hot) / rows, times weight and the incoming gradient",
    "dweight": "the sum over all chunks of (softmax − one-hot)ᵀ x / rows, times the incoming gradient",
}


def cross_entropy(x, weight, targets, dloss, dtype) -> dict:
    """Loss, dx and dweight by autograd: logits in `dtype`, softmax and loss at least in float32."""
    x, weight = (t.to(dtype).requires_grad_() for t in (x, weight))
    logits = (x @ weight.T).to(torch.promote_types(dtype, torch.float32))
    loss = (logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]).mean()
    dx, dweight = torch.autograd.grad(loss, (x, weight), torch.full_like(loss, dloss))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def draw(rng, rows, vocabulary, chunk, dtype=torch.float32, width=None, scale=1.0, dloss=1.0, lay=layouts.draw) -> dict:
    width = width or rng.integers(10, 40)
    operands = {
        "x": rng.normal(rows, width, dtype=dtype) * (scale / width**0.5),
        "weight": rng.normal(vocabulary, width, dtype=dtype), "targets": rng.tokens(rows, vocabulary=vocabulary),
    }  # fmt: skip
    operands, drawn = lay(rng, **operands)
    return {**operands, "layouts": drawn, "chunk": chunk, "dloss": dloss, "twice": True}


def draw_large(rng, dtype: str = "float32", times: int = 1) -> dict:
    """Draw a case whose logits take at least 32 MiB, even in 16 bits."""
    rows, vocabulary, chunk = (rng.integers(*bounds) for bounds in ((4200, 4300), (4100, 4200), (16, 32)))
    return draw(rng, times * rows, vocabulary, chunk, DTYPES[dtype], width=8 * rng.integers(1, 2)) | ONE_BACKWARD


def check(run, cases: list[dict], factor: float = 3.0) -> Trace:
    """Check the numbers of all cases; return the trace."""
    return check_each(run, probes.fused_losses, cases, lambda case, got: judge(case, got, factor))


def judge(case: dict, got: dict, factor: float) -> None:
    inputs = (case["x"], case["weight"], case["targets"], case["dloss"] * case.get("times", 1))
    dtype = case["x"].dtype
    want, yardstick = cross_entropy(*inputs, torch.float64), cross_entropy(*inputs, dtype)
    what = (
        f"of x {tuple(case['x'].shape)}, weight {tuple(case['weight'].shape)}, {dtype}, chunk {case['chunk']}, "
        f"incoming gradient {case['dloss']:.4g}, in memory: {layouts.listed(case['layouts'])}"
    )
    limit = case["x"].nbytes + case["weight"].nbytes
    assert got["saved"] <= limit, f"{got['saved']:,} bytes saved for backward {what}: x and weight have {limit:,}"
    for name in (n for n in want if n in got):
        assert got[name] is not None, f"{name} {what}: none came"
        expected = torch.float32 if name == "loss" else dtype
        assert got[name].dtype == expected, f"{name} {what} is {got[name].dtype}, expected {expected}"
        close(
            got[name], want[name], yardstick[name], f"{name} {what}", factor, cause=CAUSE[name],
            dims={"dx": "row, width", "dweight": "vocabulary, width"}.get(name, ""),
        )  # fmt: skip


@exercise(FUSED, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients(run, rng, dtype):
    chunk, chunks = rng.integers(8, 20), rng.integers(2, 5)
    check(run, [draw(rng, chunk * chunks, rng.integers(50, 200), c, DTYPES[dtype]) for c in (chunk, None)])


@exercise(FUSED, kind="numerics")
def test_any_strides(run, rng):
    check(run, [draw(rng, rng.integers(9, 40), rng.integers(30, 90), 8, lay=layouts.different) for _ in range(6)])


@exercise(FUSED, kind="numerics")
def test_chunks_of_any_size(run, rng):
    """Chunks of one row, of all rows, of more, and sizes that leave a smaller last chunk."""
    rows, vocabulary = rng.integers(20, 40), rng.integers(30, 90)
    chunks = [1, rows, rows + rng.integers(1, 99), rows - 1, rows // 2 + 1, rows // 3 + 1]
    cases = [draw(rng, n, vocabulary, c) for n, c in [*((rows, chunk) for chunk in chunks), (1, 1), (1, 7)]]
    check(run, [*cases, draw(rng, 128 * 2 + rng.integers(1, 99), vocabulary, None)])
    case = draw(rng, 60, 300, 16, width=8)
    seen = run(metered, APPLY, [case[name] for name in ("x", "weight", "targets", "chunk")], 2)
    assert seen["largest_elements"] <= 16 * 300, (
        f"{seen['largest_op']} made {seen['largest_shape']} for chunks of 16 rows and 300 words: at most `chunk` rows "
        "of logits exist at a time"
    )


@exercise(FUSED, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_incoming_gradient_counts(run, rng, dtype):
    """Incoming gradients: 3.7, a negative one, and a loss scale that float16 cannot represent."""
    factors = [3.7, -rng.uniform(0.1, 9.0), 65536.0]
    check(run, [draw(rng, 9, rng.integers(30, 60), 4, DTYPES[dtype], scale=0.3, dloss=f) for f in factors])


@exercise(FUSED, kind="numerics")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_fifty_times_larger_do_not_overflow(run, rng, dtype):
    case = draw(rng, rng.integers(120, 180), rng.integers(100, 200), 32, DTYPES[dtype], scale=50.0)
    check(run, [case], factor=10.0)  # softmax is one-hot in most rows, so only few errors can be compared


@exercise(FUSED, kind="numerics")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_weights_gradient_is_accumulated_in_float32(run, rng, dtype):
    """Over hundreds of chunks, sums in 16 bits drift away from a single product."""
    case = draw(rng, 600, 30, rng.integers(1, 3), DTYPES[dtype], width=16)
    case["x"] = case["x"].abs()
    (got,) = run(probes.fused_losses, [case])
    inputs = (case["x"], case["weight"], case["targets"], case["dloss"])
    want, single = (cross_entropy(*inputs, d)["dweight"].double() for d in (torch.float64, DTYPES[dtype]))
    error, unavoidable = ((d.double() - want).abs().mean() for d in (got["dweight"], single))
    assert error <= 2 * unavoidable, (
        f"mean error of dweight is {error / unavoidable:.1f} times that of one product in {dtype}: accumulate it in "
        "float32, and round once"
    )


@exercise(FUSED, kind="numerics")
@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["x alone", "weight alone"])
def test_gradients_only_where_they_are_needed(run, rng, needs):
    check(run, [draw(rng, rng.integers(9, 30), rng.integers(30, 60), 8) | {"needs": needs}])


@exercise(FUSED, kind="numerics")
def test_chunks_below_one_are_refused(run, rng):
    case, chunks = draw(rng, 5, 9, 1), [0, -1, -rng.integers(2, 99)]
    cases = [[case["x"], case["weight"], case["targets"], chunk] for chunk in chunks]
    for chunk, got in zip(chunks, run(refused, APPLY, cases), strict=True):
        assert got == "ValueError", f"chunk {chunk}: expected ValueError, got {got}"


@exercise(FUSED, kind="numerics")
def test_thousands_of_rows_and_words(run, rng):
    check(run, [draw_large(rng, rng.choice([*DTYPES]))], factor=10.0)


def check_memory(run, rng, case: dict, what: str, forbidden: int, needs: int) -> None:
    """Assert that a run whose numbers are right never held `forbidden` bytes of `what`."""
    trace = check(run, [case], factor=10.0)  # thousands are summed in another order
    (small,) = run.trace(probes.fused_losses, [draw(rng, 9, 30, 4, case["x"].dtype)])
    arguments = [case[name] for name in ("x", "weight", "targets", "chunk")]
    never_holds(trace, small, what, forbidden, needs, seen=lambda: run(metered, APPLY, arguments, 2))


@exercise(FUSED, kind="property")
def test_no_matrix_of_rows_by_vocabulary_exists(run, rng):
    """Chunks that all stay alive are the whole matrix in pieces. An eighth of the matrix at a time is too much, too."""
    case = draw_large(rng, times=4)
    rows, vocabulary = case["x"].shape[0], case["weight"].shape[0]
    needs = 8 * (case["x"].nbytes + case["weight"].nbytes) + 4 * 4 * case["chunk"] * vocabulary
    check_memory(run, rng, case, "an eighth of the matrix of rows × vocabulary", rows * vocabulary // 2, needs)


@exercise(FUSED, kind="property")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_kept_is_as_large_as_x_and_weight(run, rng, dtype):
    """Sixteen losses wait for backward: gradients in float32 would be twice as large as those in weight's dtype."""
    case = draw(rng, rng.integers(20, 30), 65_536 + rng.integers(0, 99), 8, DTYPES[dtype], width=16)
    case |= {**ONE_BACKWARD, "times": 16}
    weights = case["weight"].nbytes
    check_memory(run, rng, case, "as much again as weight, for each of 16 losses,", 16 * weights, (16 + 10) * weights)
