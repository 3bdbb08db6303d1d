"""Saved activations on the host, and back one layer ahead.

What must be true: gradients are those of the plain run; after forward nearly nothing that layers saved is on the
device; backward finds each layer's tensors already on their way. How it would be faked: copies that are kept beside the
originals (storages alive on the device are counted); everything fetched at the start of backward, or each tensor when
it is needed (copies are logged against backward's progress); parameters sent along.
"""

from __future__ import annotations

import pytest
import torch

from lab.pytest_plugin import exercise

from . import probes_offload as probes

OFFLOAD = "mixed_precision.offload"


def draw(rng) -> tuple:
    rows, width = rng.integers(24, 40), rng.integers(6, 10)
    sizes = rng.shuffled([40, 56, 72, 88, 104])[: rng.integers(3, 5)]
    states = [
        {"into.weight": rng.normal(s, width) / 3, "into.bias": rng.normal(s),
         "out.weight": rng.normal(width, s) / s**0.5, "out.bias": rng.normal(width)}
        for s in sizes
    ]  # fmt: skip
    return states, sizes, rng.normal(rows, width), 4 * rows * 32  # larger than x and than a number a row


@exercise(OFFLOAD, kind="numerics")
@pytest.mark.parametrize("case", range(2))
def test_gradients_are_those_of_the_plain_run(run, rng, case):
    drawn = draw(rng)
    got, want = (run(probes.offloaded, *drawn, how, device="simulated") for how in ("offloaded", "plain"))
    assert torch.equal(got["y"], want["y"]), "the result differs from the plain run's"
    for i, (g, w) in enumerate(zip(got["grads"], want["grads"], strict=True)):
        assert torch.equal(g, w), f"gradient {i} differs by up to {(g - w).abs().max():.3g}"


@exercise(OFFLOAD, kind="property")
def test_what_layers_saved_is_not_on_the_device(run, rng):
    states, sizes, x, minimum = draw(rng)
    got, plain = (run(probes.offloaded, states, sizes, x, minimum, how, device="simulated") for how in ("o", "plain"))
    large = sum(x.shape[0] * size * 4 for size in sizes)
    left = len(sizes) * x.shape[0] * (2 * x.shape[1] + 3) * 4  # inputs of layers and numbers a row: below the minimum
    assert plain["alive"] >= 2 * large, "the plain run saves less than it should: the kit is wrong"
    assert got["alive"] <= left, (
        f"after forward {got['alive']:,} bytes that layers made are alive on the device, plainly {plain['alive']:,}; "
        f"small tensors are {left:,}"
    )


@exercise(OFFLOAD, kind="property")
def test_large_activations_travel_and_nothing_else_does(run, rng):
    states, sizes, x, minimum = draw(rng)
    log = run(probes.offloaded, states, sizes, x, minimum, "offloaded", device="simulated")["log"]
    sent = {numel for what, numel in log if what == "send"}
    weights, activations = ({n * size for size in sizes} for n in (x.shape[1], x.shape[0]))
    assert all(numel * 4 >= minimum for numel in sent), f"{sorted(sent)} numbers were sent, minimum {minimum} bytes"
    assert sent == activations, (
        f"layers save activations of {sorted(activations)} numbers, sent were {sorted(sent)}; weights have "
        f"{sorted(weights)}"
    )


@exercise(OFFLOAD, kind="property")
def test_tensors_come_back_one_layer_ahead(run, rng):
    states, sizes, x, minimum = draw(rng)
    log = run(probes.offloaded, states, sizes, x, minimum, "offloaded", device="simulated")["backward"]
    begins = {layer: at for at, (what, layer) in enumerate(log) if what == "backward"}
    for layer, size in enumerate(sizes):
        fetches = [at for at, (what, n) in enumerate(log) if what == "fetch" and n == x.shape[0] * size]
        assert fetches, f"nothing of layer {layer} came back, and it saved activations of {x.shape[0] * size} numbers"
        if layer < len(sizes) - 1:
            assert max(fetches) < begins[layer], (
                f"layer {layer}: fetched when its backward had begun: layer {layer + 1} could have hidden that"
            )
            assert min(fetches) > begins[layer + 1], (
                f"layer {layer}: fetched before backward of layer {layer + 1} began: more than one layer ahead"
            )
