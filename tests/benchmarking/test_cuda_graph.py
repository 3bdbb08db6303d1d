"""A recorded step, replayed. Needs CUDA; without it, the tests are skipped.

Must hold: a replay returns the step's results for any inputs, leaves earlier results unchanged, runs no Python and
launches no operator. Typical fake: call the step again (caught by counting calls and operators).
"""

import pytest
import torch

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise

from . import probes_extensions as probes

GRAPH = "benchmarking.cuda_graph"


@pytest.fixture
def got(run, rng):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    n = 16 * rng.integers(2, 6)
    return run(probes.graphed, rng.normal(8, n), rng.normal(n, n) / n**0.5, [rng.normal(8, n) for _ in range(3)])


@exercise(GRAPH, kind="numerics")
def test_a_replay_gives_what_the_step_would(got):
    for i, (output, expected) in enumerate(zip(got["outputs"], got["expected"], strict=True)):
        close(output, expected.double(), expected, f"call {i}", dims="row, column")


@exercise(GRAPH, kind="numerics")
def test_other_inputs_are_refused(got):
    raised = dict(zip(("another shape", "another number", "another dtype", "on the CPU"), got["refused"], strict=True))
    assert {*raised.values()} == {"ValueError"}, f"expected a ValueError for each of these inputs, got {raised}"


@exercise(GRAPH, kind="property")
def test_a_replay_runs_no_python_and_launches_no_operator(got):
    assert got["recorded"] == 2 + 1, f"with warmup=2 the step ran {got['recorded']} times: to capture it is one more"
    assert got["aside"], "the warm-up ran on the default stream: work there cannot be captured, nor overlap"
    assert got["later"] == got["recorded"], (
        f"the step was called {got['later'] - got['recorded']} times after recording"
    )
    assert got["products"] == 0, f"a replay ran {got['products']} products one by one"
