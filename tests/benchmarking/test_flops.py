"""FLOPs on paper, against those of a run.

What must be true: each layer's products, forward and backward, are those that the real model makes, causal attention
counted half. How it would be faked: 6·N·D of all parameters (the quadratic part and the embedding are in the cases);
one number split by shares (every layer is compared); running the model and counting (a million layers, and
no module can be made).
"""

from __future__ import annotations

import pytest

from lab.harness.judge import harmless, measured
from lab.harness.pytest_plugin import exercise

from . import probes_counting as probes

FLOPS = "benchmarking.flops"
NAMES = ("q_proj", "k_proj", "v_proj", "scores", "values", "o_proj", "gate_proj", "up_proj", "down_proj", "head")
WITHIN = 0.01
PATIENCE_S = 8.0  # to count a million layers: a formula takes none of it, a model of so many a quarter of an hour
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
    for name in NAMES:
        half = 2 if name in ("scores", "values") else 1  # causal: by the conventions
        for direction in (0, 1):
            expected = want[name][direction] / half
            off, short = got[name][direction] / expected - 1, expected / (got[name][direction] or 1)
            assert abs(off) <= WITHIN, (
                f"{name}, {('forward', 'backward')[direction]}, of {sizes}, batch {batch}, context {context}: got "
                f"{got[name][direction]:,}, a run counts {expected:,.0f} ({off:+.1%}): "
                f"{why(name, direction, short, sizes, context)}"
            )


@harmless
def why(name: str, direction: int, short: float, sizes: dict, context: int) -> str:
    """short: how many times as much was to be counted."""
    layers = sizes["layers"]
    shares = {
        1 / layers: f"the number of blocks, {layers}, times too much: this is multiplied once" if layers > 1 else "",
        layers: f"of one block of {layers}" if layers > 1 else "",
        2: "half: is each multiply-add counted as two operations?",
        context: "the context, of what grows with its square, is a factor once",
    }
    for factor, words in shares.items():
        if words and abs(short / factor - 1) <= WITHIN:
            return words
    if name in ("scores", "values"):
        return "2·batch·heads·context²·dim for the whole matrix, and causal counts half"
    if direction == 1:
        return "backward is two products of the same size for each of forward's"
    return "a product of (m, k) and (k, n) is 2·m·k·n, in every block; how wide are keys and values?"


@exercise(FLOPS, kind="property")
def test_a_million_layers_are_counted_without_a_model(run, rng):
    """A formula answers, and a run does not, on the meta device or otherwise; only attention grows with context²."""
    sizes, batch, context = draw(rng, rng.choice([*CASES]))
    few, many = sizes["layers"], rng.integers(10**6, 2 * 10**6)
    want = run(probes.counted, sizes, batch, context, "float32")["flops"]
    got = run(
        probes.flops, {**sizes, "layers": many, "context": 4 * context}, batch, 4 * context, True, timeout=PATIENCE_S
    )
    measured("layers that were counted", many, many)
    for name in NAMES:
        square = name in ("scores", "values")
        for direction in (0, 1):
            one = want[name][direction] // (2 if square else 1)  # causal: by the conventions
            expected = (16 if square else 4) * one * (1 if name == "head" else many) // (1 if name == "head" else few)
            assert got[name][direction] == expected, (
                f"{name}, {('forward', 'backward')[direction]}, of {many:,} layers: got {got[name][direction]:,}, "
                f"expected {expected:,}, exactly: a run of {few} counts {one:,} at a fourth of the context, so "
                f"{'sixteen' if square else 'four'} times that{' for each layer' * (name != 'head')}"
            )
