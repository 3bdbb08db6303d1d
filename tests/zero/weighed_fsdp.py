"""Checks the memory of a rank at one moment of a step of a large net, by the kernel's memory peak."""

import torch

from lab.harness.judge import never_holds

from . import oracles_fsdp as oracles
from . import probes_fsdp
from .messages_fsdp import parts
from .probes_fsdp import Net

WORLD = 4
MOMENTS = {  # kind: moment: (how often a W-th of all parameters may be held, beside a few layers; what is forbidden)
    "gather": {
        "forward": (1, "all layers whole, as they are or for autograd: gather each for its own forward, and free it,"),
        "backward": (2, "all layers or their whole gradients: free each layer's when it is done,"),
        "gradients": (2, "whole gradients, all layers, or copies, in torch or not: keep this rank's part alone,"),
    },
    "prefetch": {
        "forward": (1, "all layers whole, or many at once: fetch the next one alone, and free each,"),
        "backward": (3, "all layers or their whole gradients: fetch the next one alone, and free each,"),
    },
    "mixed": {
        # The masters, their 16-bit copies, the gathered layer in 16 bits, and its activations.
        "forward": (5.4, "the layer in use in float32: cast each shard before the gather, compute in 16 bits,"),
    },
    "zero2": {
        "backward": (WORLD + 1, "whole gradients: start each reduce-scatter in its hook, and wait for all but one,"),
        "gradients": (WORLD + 2, "whole gradients, in torch or not: drop each when it has been reduce-scattered,"),
    },
}


def check_holds_part(run, rng, kind, moment) -> None:
    """Assert that at this moment a rank holds only its shard and the layers in use, by the kernel's memory peak."""
    world, seed, mixed = WORLD, rng.integers(0, 10**6), kind == "mixed"
    steps = 1 + (kind == "prefetch")  # the first step of "prefetch" learns the order
    blocks = 1 if mixed else 16
    hidden = rng.integers(11000, 11200) if mixed else rng.integers(1300, 1350)
    plan = {"width": 1024 if mixed else 256, "hidden": [hidden] * blocks, "vocabulary": 128}
    tokens = [rng.tokens(1, vocabulary=128) for _ in range(world)]
    total = 4 * parts(plan, world)[2]
    small = {"width": 8, "hidden": [16] * blocks, "vocabulary": 128}
    ballast = 3 * total // 2  # more than the whole net, which exists only at creation
    traces = run.trace(probes_fsdp.weighed, kind, plan, seed, tokens, moment, ballast, steps, world=world)
    (baseline,) = run.trace(probes_fsdp.weighed, kind, small, seed, tokens, moment, 1 << 12, steps, world=1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = Net(plan).state_dict()
    batches = [[[[rank_tokens, torch.zeros(1, 128), list(range(blocks))]]] * steps for rank_tokens in tokens]
    want = oracles.whole_batch(plan, state, batches, ["sgd", 0.1], "", {})
    shares, what = MOMENTS[kind][moment]
    for rank, trace in enumerate(traces):
        label, loss = f"rank {rank} of {world}", want["losses"][rank][-1]
        assert abs(trace.values["loss"] - loss) <= (1e-2 if mixed else 1e-4) * loss, (
            f"{label}: the loss is {trace.values['loss']:.7g}, expected {loss:.7g}"
        )
        for name, tensor in want["state"].items():
            error = (trace.values["sums"][name] - tensor.double().sum(0)).abs().max()
            assert error <= 1e-3, f"{label}: {name} after SGD is off by {float(error):.3g}, summed over its rows"
        never_holds(trace, baseline, what, 3 * total // 8 if mixed else total, ballast + int(shares * total / world))
