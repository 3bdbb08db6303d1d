"""Saved activations on the host, fetched one layer ahead.

Must hold: gradients are those of the plain run; after forward, almost nothing that layers saved is on the device; each
layer's tensors are fetched before its backward begins. Typical fakes: copies beside the originals (caught by counting
storages alive on the device); all fetches at the start of backward, or each when it is needed (caught by a log of
copies and of backward's progress); parameters sent along; copies on the stream of the work, or streams that do not wait
for each other (caught because the simulated device is then late, or early, by a known time).
"""

import pytest
import torch

from lab.harness.judge import bars, measured
from lab.harness.pytest_plugin import exercise

from . import probes_offload as probes

OFFLOAD = "mixed_precision.offload"
HOST_BYTES_PER_S = 32e9  # bandwidth of the simulated device's link to the host
OVERHEAD_S = 40e-6  # launches and small operators that nothing hides
SMALL = 4096  # bytes of x and its gradients


def draw(rng) -> tuple:
    rows, width = rng.integers(24, 40), rng.integers(6, 10)
    sizes = rng.shuffled([40, 56, 72, 88, 104])[: rng.integers(4, 5)]  # of 3 layers, two ahead would be all
    states = [
        {"into.weight": rng.normal(s, width) / 3, "into.bias": rng.normal(s),
         "out.weight": rng.normal(width, s) / s**0.5, "out.bias": rng.normal(width), "gain": rng.normal(width),
         "fused": rng.normal(2 * width)}
        for s in sizes
    ]  # fmt: skip
    return states, sizes, rng.normal(rows, width), 4 * rows * min(sizes)  # more bytes than x, or one number per row


def check_same(got: dict, want: dict, prefix: str = "") -> None:
    """Assert that results and gradients are those of the plain run, to the last bit."""
    assert torch.equal(got["y"], want["y"]), f"{prefix}the result differs from the plain run's"
    assert len(got["grads"]) == len(want["grads"]), f"{prefix}other tensors got gradients"
    for i, (g, w) in enumerate(zip(got["grads"], want["grads"], strict=True)):
        assert torch.equal(g, w), f"{prefix}gradient {i} differs by up to {(g - w).abs().max():.3g}"


@exercise(OFFLOAD, kind="numerics")
@pytest.mark.parametrize("case", range(2))
def test_gradients_are_those_of_the_plain_run(run, rng, case):
    drawn = draw(rng)
    check_same(*(run(probes.offloaded, *drawn, mode, device="simulated") for mode in ("offloaded", "plain")))


@exercise(OFFLOAD, kind="numerics")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["plain call", "twice", "no grad"])
def test_every_way_of_calling(run, rng, kind, device):
    drawn, where = draw(rng)[:3], "simulated" if device == "cuda" else "real"
    got, want = (run(probes.called, *drawn, mode, device, kind, device=where) for mode in ("offloaded", "plain"))
    check_same(got, want, f"{kind} on {device}: ")
    assert torch.equal(got["after"], want["after"]), f"{kind} on {device}: the random stream has moved"


@exercise(OFFLOAD, kind="property")
def test_what_layers_saved_is_not_on_the_device(run, rng):
    states, sizes, x, minimum = draw(rng)
    got, plain = (run(probes.offloaded, states, sizes, x, minimum, mode, device="simulated") for mode in ("o", "plain"))
    large = sum(x.shape[0] * size * 4 for size in sizes)
    left = len(sizes) * x.shape[0] * (4 * x.shape[1] + 3) * 4  # layers' inputs, one number per row: below minimum
    assert plain["alive"] >= 2 * large, "the plain run saves less than it should: the kit is wrong"
    measured("alive on the device after forward", got["alive"], left, "bytes", at_most=True)
    assert got["alive"] <= left, (
        f"after forward {got['alive']:,} bytes that layers made are alive on the device, plainly {plain['alive']:,}; "
        f"small tensors are {left:,}"
        f"{bars({'plainly': plain['alive'], 'yours': got['alive'], 'small': left}, 'bytes')}"
    )


@exercise(OFFLOAD, kind="property")
def test_only_large_activations_are_offloaded(run, rng):
    states, sizes, x, minimum = draw(rng)
    activations = {x.shape[0] * size for size in sizes}
    for limit in (16, minimum):  # weights may be below `minimum`: 16 shows whether they are sent
        log = run(probes.offloaded, states, sizes, x, limit, "offloaded", device="simulated")["log"]
        sent = [(4 * numel, owner) for what, numel, owner in log if what == "send"]
        owned = [f"{owner}, {size:,} bytes" for size, owner in sent if owner]
        small = [size for size, _ in sent if size < limit]
        assert not owned, (
            f"with minimum={limit:,}, {len(owned)} of {len(sent)} tensors sent have a parameter's storage: "
            f"{'; '.join(owned[:2])}{'; …' if len(owned) > 2 else ''}"
        )
        assert not small, (
            f"with minimum={limit:,}, {len(small)} of {len(sent)} tensors sent have less than that: "
            f"{', '.join(f'{size:,}' for size in sorted(set(small)))} bytes"
        )
    assert {size // 4 for size, _ in sent} == activations, (
        f"with minimum={minimum:,} bytes, layers save activations of {sorted(4 * n for n in activations)} bytes that "
        f"large, sent were tensors of {sorted({size for size, _ in sent})}"
    )


@exercise(OFFLOAD, kind="property")
def test_tensors_come_back_one_layer_ahead(run, rng):
    states, sizes, x, minimum = draw(rng)
    log = run(probes.offloaded, states, sizes, x, minimum, "offloaded", device="simulated")["backward"]
    starts = {layer: i for i, (what, layer, _) in enumerate(log) if what == "backward"}
    for layer, size in enumerate(sizes):
        fetches = [i for i, (what, n, _) in enumerate(log) if what == "fetch" and n == x.shape[0] * size]
        assert fetches, f"nothing of layer {layer} came back, and it saved activations of {x.shape[0] * size} numbers"
        if layer < len(sizes) - 1:
            assert max(fetches) < starts[layer], (
                f"layer {layer} was fetched when its own backward had begun: in that of layer {layer + 1} it could "
                "have hidden"
            )
            assert min(fetches) > starts[layer + 1], (
                f"layer {layer} was fetched before backward of layer {layer + 1} began: more than one layer ahead"
            )


def draw_timed(rng) -> tuple[list[int], list[float]]:
    """Numbers saved and seconds of work per layer. Copying one layer takes less than half of any layer's backward."""
    layers = rng.integers(4, 6)
    return [rng.integers(300_000, 600_000) for _ in range(layers)], [rng.uniform(4e-4, 6e-4) for _ in range(layers)]


@exercise(OFFLOAD, kind="property")
def test_what_is_on_the_device_belongs_to_two_layers(run, rng):
    counts, seconds = draw_timed(rng)
    got = run(probes.timed, counts, seconds, device="simulated")
    for moment, bytes in zip(("forward", "a backward that keeps the graph"), got["after"], strict=False):
        assert bytes <= SMALL, (
            f"{bytes:,} bytes are on the device after {moment}: the host's copy is kept for another backward, and the "
            "device's is freed once it has been used"
        )
    order = [row[0] for row in got["rows"]]
    assert order == 2 * [*range(len(counts))][::-1], f"two backwards went through layers {order}"
    for i, tensors, present in got["rows"]:
        assert present, f"layer {i}'s backward got a tensor that is not on the device"
        on_device, own, before = sum(tensors), 4 * counts[i], 8 * counts[i - 1] if i else 0
        assert own + before <= on_device <= 2 * own + before + SMALL, (
            f"in the second half of layer {i}'s backward {on_device:,} bytes are on the device; it works with {own:,}, "
            f"and {before:,} of the layer before it should be there or on the way"
        )
    assert got["left"] <= SMALL, f"{got['left']:,} bytes are left on device and host after backward"


@exercise(OFFLOAD, kind="property")
def test_copies_hide_behind_work_and_each_waits_for_the_other(run, rng):
    counts, seconds = draw_timed(rng)
    got = run(probes.timed, counts, seconds, device="simulated")
    work, last, copies = sum(seconds), 4 * counts[-1] / HOST_BYTES_PER_S, 8 * sum(counts) / HOST_BYTES_PER_S
    forward_s, (backward_s, second_s) = got["forward_s"], got["backward_s"]
    for name, spent, exposed in (
        ("forward", forward_s, last), ("backward", backward_s, 2 * last), ("a second backward", second_s, 2 * last)
    ):  # fmt: skip
        assert spent <= work + exposed + OVERHEAD_S, (
            f"{name} took {1e6 * spent:.0f} µs; the work is {1e6 * work:.0f}, all copies {1e6 * copies:.0f}, of which "
            f"only the last layer's {1e6 * exposed:.0f} show"
        )
        assert spent >= work + 0.9 * last, (
            f"{name} took {1e6 * spent:.0f} µs; work is {1e6 * work:.0f}, the last layer's copy {1e6 * last:.0f}: that "
            "cannot start before the tensor is computed, nor the work before the tensor is there"
        )
