"""FLOPs by formula, compared with those of a run.

Must hold: each layer's FLOPs, forward and backward, are those of the real model's products; causal attention counts
half. Typical fakes: 6·N·D with all parameters (caught by long contexts and large embeddings); one total that is split
in proportion (caught because every layer is compared); running the model and counting (caught by a million layers,
where creating a module raises).
"""

import pytest

from lab.harness.diagnose import harmless
from lab.harness.judge import Judged, measured
from lab.harness.pytest_plugin import exercise

from . import probes_counting as probes

FLOPS = "benchmarking.flops"
NAMES = ("q_proj", "k_proj", "v_proj", "scores", "values", "o_proj", "gate_proj", "up_proj", "down_proj", "head")
SQUARES, DIRECTIONS = ("scores", "values"), ("forward", "backward")
TOLERANCE = 0.01
PATIENCE_S = 8.0  # to count a million layers: a formula takes almost no time, a model a quarter of an hour
CASES = {
    "long context": {"batch": (1, 2), "context": (120, 160), "width": 16, "hidden": (20, 40), "vocabulary": (20, 60)},
    "short context": {"batch": (8, 12), "context": (6, 12), "width": 48, "hidden": (90, 150), "vocabulary": (50, 90)},
    "many words": {"batch": (2, 3), "context": (20, 30), "width": 32, "hidden": (60, 90), "vocabulary": (900, 1500)},
}  # fmt: skip


def draw(rng, case: str) -> tuple[dict, int, int]:
    ranges = CASES[case]
    heads, kv_heads = rng.choice([(4, 1), (4, 2), (2, 1)])
    batch, context, hidden, vocabulary = (
        rng.integers(*ranges[n]) for n in ("batch", "context", "hidden", "vocabulary")
    )
    sizes = {
        "layers": rng.integers(1, 3), "width": ranges["width"], "heads": heads, "kv_heads": kv_heads,
        "hidden": hidden, "vocabulary": vocabulary, "context": context + rng.integers(0, 9),
    }  # fmt: skip
    return sizes, batch, context


@exercise(FLOPS, kind="numerics")
@pytest.mark.parametrize("case", CASES)
def test_each_layer_forward_and_backward(run, rng, case):
    sizes, batch, context = draw(rng, case)
    got = run(probes.flops, sizes, batch, context)
    want = run(probes.counted, sizes, batch, context, "float32")["flops"]
    assert set(got) == set(NAMES), f"expected the layers {', '.join(NAMES)}, got {', '.join(sorted(got))}"
    expected = {  # by convention, causal attention counts half of its matrix
        (name, i): want[name][i] / (2 if name in SQUARES else 1) for name in NAMES for i in (0, 1)
    }
    ratios = {(name, i): got[name][i] / count for (name, i), count in expected.items()}
    wrong = {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE}
    if wrong:
        name, i = first = next(iter(wrong))
        raise Judged(
            f"{name}, {DIRECTIONS[i]}: got {got[name][i]:,}, a run counts {expected[first]:,.0f} "
            f"({wrong[first] - 1:+.1%}); {len(wrong)} of {len(ratios)} counts are off (of {sizes}, batch {batch}, "
            f"context {context})",
            why(wrong),
        )


# (layers with wrong counts, the ratio got / expected or None if it varies, the likely cause)
CAUSES = [
    ({*NAMES}, 1 / 2, "a product of (m, k) and (k, n) is 2·m·k·n, and backward is two of them for each of forward's"),
    ({*NAMES} - {*SQUARES}, 1 / 2, "each multiply-add is two operations: a product of (m, k) and (k, n) is 2·m·k·n"),
    ({*SQUARES}, 2, "causal attention counts half of its matrix"),
    ({*SQUARES}, None, "scores and values each count 2·batch·heads·context²·dim / 2: causal attention counts half"),
    ({"k_proj", "v_proj"}, None, "the width of keys and values is kv_heads·dim"),
    ({"head"}, None, "the head is 2·batch·context·width·vocabulary, once, not per block"),
]


@harmless
def why(wrong: dict[tuple[str, int], float]) -> str:
    """The likely cause of all wrong counts. wrong: ratio got / expected, by (layer, direction)."""
    names, ratio = {name for name, _ in wrong}, next(iter(wrong.values()))
    alike = max(wrong.values()) <= min(wrong.values()) * (1 + TOLERANCE)
    for layers, times, cause in CAUSES:
        if layers == names and (times is None or (alike and abs(ratio / times - 1) <= TOLERANCE)):
            return cause
    return "a product of (m, k) and (k, n) is 2·m·k·n, in every block; what are m, k and n here?"


@exercise(FLOPS, kind="property")
def test_a_million_layers_are_counted_without_a_model(run, rng):
    """A formula can answer; a run cannot, not even on the meta device. Only attention grows with context²."""
    sizes, batch, context = draw(rng, rng.choice([*CASES]))
    few, many = sizes["layers"], rng.integers(10**6, 2 * 10**6)
    want = run(probes.counted, sizes, batch, context, "float32")["flops"]
    got = run(
        probes.flops, {**sizes, "layers": many, "context": 4 * context}, batch, 4 * context, True, timeout=PATIENCE_S
    )
    measured("layers that were counted", many, many)
    for name in NAMES:
        square, blocks = name in SQUARES, (1, 1) if name == "head" else (many, few)
        for direction in (0, 1):
            one = want[name][direction] // (2 if square else 1)  # causal attention counts half
            expected = (16 if square else 4) * one * blocks[0] // blocks[1]
            assert got[name][direction] == expected, (
                f"{name}, {DIRECTIONS[direction]}, of {many:,} layers: got {got[name][direction]:,}, "
                f"expected {expected:,}, exactly: a run of {few} counts {one:,} at a fourth of the context, so "
                f"{'sixteen' if square else 'four'} times that{' for each layer' * (name != 'head')}"
            )
