"""The dtypes of a training step, predicted and then observed.

Must hold: the prediction is what a run shows, on the CPU and on CUDA, whose lists of operators differ. CUDA's autocast
runs on fake tensors, so it needs no GPU. Typical fake: run the model (caught by layers whose forward raises); such a
run would also show nothing about a missing device.
"""

import pytest

from lab.harness.pytest_plugin import exercise

from . import probes_precision as probes

TABLE = "mixed_precision.dtype_table"
INNER = sorted(set(probes.LAYERS) - {"embedding"})
WHY = {
    "parameters": "autocast leaves parameters as they are",
    "gradients": "a gradient has its parameter's dtype",
    "loss": "under autocast losses are computed in float32; without it, MSELoss promotes to its target's dtype",
}


def check(run, layers, parameters, loss, autocast, device, runs=True):
    got = run(probes.predicted, layers, parameters, loss, autocast, device, runs)
    want = run(probes.observed, layers, parameters, loss, autocast, device)
    setting = f"{parameters} parameters, autocast {autocast} on {device}; the chain: {' -> '.join(layers)}"
    for table in ("parameters", "activations", "gradients"):
        assert set(got[table]) == set(want[table]), (
            f"{table} are {sorted(want[table])}, the table names {sorted(got[table])} ({setting})"
        )
        for name, dtype in want[table].items():
            assert got[table][name] == dtype, (
                f"{table[:-1]} {name} is {dtype}, the table says {got[table][name]}: "
                f"{WHY.get(table) or input_hint(want[table], name)} ({setting})"
            )
    assert got["loss"] == want["loss"], (
        f"the loss is {want['loss']}, the table says {got['loss']}: {WHY['loss']} ({loss}, {setting})"
    )


def input_hint(activations: dict[str, str], name: str) -> str:
    before = dict(zip([*activations][1:], activations.values(), strict=False))
    return f"what comes in is {before[name]}" if name in before else "it is the first layer"


@exercise(TABLE, kind="numerics")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("autocast", ["float16", "bfloat16"])
def test_under_autocast_the_table_is_what_a_run_shows(run, rng, autocast, device):
    layers = ["linear", *rng.shuffled(INNER)]  # every kind of layer, after a matrix product
    check(run, layers, "float32", rng.choice(["mse", "cross_entropy"]), autocast, device)
    check(run, ["embedding", "relu"], rng.choice(["float16", "bfloat16"]), "mse", autocast, device)
    first = [rng.choice(["embedding", "layer_norm", "tanh"]), *rng.shuffled(INNER)[:5]]
    check(run, first, "float32", rng.choice(["mse", "cross_entropy"]), autocast, device)


@exercise(TABLE, kind="numerics")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_autocast_everything_keeps_the_parameters_dtype(run, rng, dtype):
    for loss in ("mse", "cross_entropy"):
        check(run, ["embedding", "linear", *rng.shuffled(INNER)[:4]], dtype, loss, "none", rng.choice(["cpu", "cuda"]))


@exercise(TABLE, kind="property")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("autocast", ["float16", "bfloat16"])
def test_layers_that_cannot_be_run_are_in_the_table_too(run, rng, autocast, device):
    """Every layer's forward raises: dtypes follow from the rules alone."""
    check(run, ["linear", *rng.shuffled(INNER)], "float32", rng.choice([*probes.LOSSES]), autocast, device, runs=False)
