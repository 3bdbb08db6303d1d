"""The memory of a training step, counted by formula and measured in a run.

Must hold: each of the four counts is within 0.1 % of what a real step of the real model keeps, for any sizes, both
precisions, with and without checkpointing. Typical fakes: a formula that fits one size (caught by cases in which the
quadratic part dominates or vanishes, heads are grouped, or the vocabulary is large); running the model and measuring
(caught by a million layers, where creating a module raises).
"""

import pytest

from lab.harness.diagnose import harmless, in_parts
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_precision as probes

ACCOUNTING = "mixed_precision.accounting"
TOLERANCE = 0.001
PATIENCE_S = 8.0  # to count a million layers: a formula takes almost no time, a model a quarter of an hour
CASES = {
    "long context": {"batch": (1, 2), "context": (150, 200), "width": 16, "hidden": (20, 40), "vocabulary": (20, 60)},
    "short context": {"batch": (8, 12), "context": (8, 16), "width": 64, "hidden": (150, 250), "vocabulary": (50, 90)},
    "many words": {"batch": (3, 4), "context": (30, 50), "width": 32, "hidden": (60, 90), "vocabulary": (900, 1500)},
}  # fmt: skip
MEANING = {
    "parameters": "how many numbers does the model learn, and in how many bytes?",
    "gradients": "one for each parameter, in its dtype",
    "optimizer": "two float32 moments a parameter, and a float32 master where the parameter is smaller",
    "activations": "go through the docstring's list for one block",
}
PER_PARAMETER = {  # bytes of the optimizer per parameter: the mistake that gives them
    "float32": {
        4: "one moment, or moments in 16 bits",
        12: "moments and a master, of which a float32 parameter needs none",
    },
    "bfloat16": {
        4: "moments in bfloat16 and no master",
        6: "moments and a master in bfloat16",
        8: "no master (4 + 4), or moments in bfloat16 (2 + 2 + 4)",
        10: "a master in bfloat16 (4 + 4 + 2)",
        16: "a float32 gradient beside them (4 + 4 + 4 + 4)",
    },
}


def draw(rng, case: str, layers: int) -> tuple[dict, int, int]:
    bounds = CASES[case]
    heads, kv_heads = rng.choice([(4, 1), (8, 2), (4, 4)])
    batch, context, hidden, vocabulary = (
        rng.integers(*bounds[n]) for n in ("batch", "context", "hidden", "vocabulary")
    )
    sizes = {
        "layers": layers, "width": bounds["width"], "heads": heads, "kv_heads": kv_heads, "hidden": hidden,
        "vocabulary": vocabulary, "context": context + rng.integers(0, 9),
    }  # fmt: skip
    return sizes, batch, context


def check(run, names, *case) -> None:
    sizes, batch, context, precision, segment = case
    got, want = run(probes.accounted, *case), run(probes.measured, *case)
    for name in names:
        error = got[name] / want[name] - 1
        assert abs(error) <= TOLERANCE, (
            f"{name} of {sizes}, batch {batch}, context {context}, {precision}, segment {segment}: counted "
            f"{got[name]:,} bytes, measured {want[name]:,} ({error:+.2%}): "
            f"{MEANING[name]}{per_parameter(name, got, want, precision)}{short_last(name, sizes['layers'], segment)}"
            f"{in_parts(got[name], want[name], parts(sizes, batch, context, precision))}"
        )


def parts(sizes: dict, batch: int, context: int, precision: str) -> dict[str, int]:
    """Bytes of each item in the docstring's list, for T = batch · context tokens and s bytes per element."""
    tokens, s = batch * context, {"float32": 4, "bfloat16": 2}[precision]
    width, layers = sizes["width"], sizes["layers"]
    one = {
        "T·width·s, a segment's input or one of q, k, v, o": s * tokens * width,
        "T·width in float32, a norm's input": 4 * tokens * width,
        "T·hidden·s, one of SwiGLU's four": s * tokens * sizes["hidden"],
        "the probabilities of a block": s * batch * sizes["heads"] * context**2,
        "the mask of a block": context**2,
        "T·vocabulary in float32, the loss's": 4 * tokens * sizes["vocabulary"],
        "T ids of 8 bytes": 8 * tokens,
        "T float32 numbers, one a token": 4 * tokens,
    }
    return one | {f"{name}, in each of {layers} blocks": layers * size for name, size in one.items()}


@harmless
def short_last(name: str, layers: int, segment: int | None) -> str:
    """A hint if the last segment is short, so that an earlier one keeps the most; else ""."""
    if name != "activations" or not segment or segment > layers or not layers % segment:
        return ""
    lengths = ", ".join(map(str, [segment] * (layers // segment) + [layers % segment]))
    return f"; segments of {lengths} blocks: the last is short, the one before it, of {segment}, keeps more"


@harmless
def per_parameter(name: str, got: dict, want: dict, precision: str) -> str:
    """The optimizer's bytes per parameter, and the mistake that gives them; "" for other counts."""
    if name != "optimizer":
        return ""
    count = want["parameters"] / {"float32": 4, "bfloat16": 2}[precision]
    each, expected = got[name] / count, want[name] / count
    hint = next((f": {what}" for n, what in PER_PARAMETER[precision].items() if abs(each - n) < 0.05), "")
    return f"\n{each:.3g} bytes a parameter instead of {expected:.3g}{hint}"


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_gradients_and_optimizer(run, rng, precision):
    for case in CASES:
        sizes, batch, context = draw(rng, case, rng.integers(1, 3))
        check(run, ("parameters", "gradients", "optimizer"), sizes, batch, context, precision, None)


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_activations(run, rng, case, precision):
    check(run, ("activations",), *draw(rng, case, rng.integers(2, 4)), precision, None)


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_activations_with_checkpointing(run, rng, case, precision):
    sizes, batch, context = draw(rng, case, rng.integers(3, 5))
    for segment in (1, 2, 7):
        check(run, ("activations",), sizes, batch, context, precision, segment)


@exercise(ACCOUNTING, kind="property")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_million_layers_are_counted_without_a_model(run, rng, precision):
    """Each layer beyond the first takes as many bytes as the second one takes in a run."""
    (sizes, batch, context), many = draw(rng, rng.choice([*CASES]), 1), rng.integers(10**6, 2 * 10**6)
    one, two = (run(probes.measured, {**sizes, "layers": n}, batch, context, precision, None) for n in (1, 2))
    got = run(
        probes.accounted, {**sizes, "layers": many}, batch, context, precision, None, True, timeout=PATIENCE_S
    )  # fmt: skip
    for name in MEANING:
        want = one[name] + (many - 1) * (two[name] - one[name])
        measured(f"{name} of {many:,} layers", got[name], want, "bytes")
        assert abs(got[name] / want - 1) <= TOLERANCE, (
            f"{name} of {many:,} layers, {precision}: counted {got[name]:,} bytes ({got[name] / want - 1:+.2%}); runs "
            f"of one layer and of two keep {one[name]:,} and {two[name]:,}, which makes {want:,}"
        )
