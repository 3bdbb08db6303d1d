"""Two runs with one seed agree bit for bit, and code outside the block notices nothing.

Must hold: every generator is seeded, deterministic algorithms are requested, and the block restores everything. Typical
fakes: torch.manual_seed alone; settings that stay; a block that an exception leaves open.
"""

import pytest
import torch

from lab.harness.pytest_plugin import exercise

from . import probes_extensions as probes

DETERMINISM = "benchmarking.determinism"


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@exercise(DETERMINISM, kind="numerics")
def test_one_seed_gives_one_run(run, rng):
    got = run(probes.runs, rng.integers(1, 10**9), rng.integers(10**9 + 1, 2 * 10**9), rng.integers(5, 20))
    differ = [source for source in probes.SOURCES if not same(got["first"][source], got["second"][source])]
    assert not differ, f"two runs of one seed draw different numbers from {', '.join(differ)}: seed each generator"
    for source in probes.SOURCES:
        assert not same(got["first"][source], got["other"][source]), f"two seeds draw the same numbers from {source}"


@exercise(DETERMINISM, kind="numerics")
def test_smallest_and_largest_seeds_are_accepted(run, rng):
    for seed in (0, 2**64 - 1 - rng.integers(0, 99)):
        got = run(probes.runs, seed, 7, 5)
        assert same(got["first"]["numpy"], got["second"]["numpy"]), f"two runs of the seed {seed} differ"


@exercise(DETERMINISM, kind="numerics")
@pytest.mark.parametrize("broken", [False, True], ids=["left", "left by an exception"])
def test_block_restores_random_states_and_settings(run, rng, broken):
    seed = rng.integers(1, 999)
    got, want = (run(probes.block_effects, seed, enter, broken) for enter in (True, False))
    other = [source for source in probes.SOURCES if not same(got["drawn"][source], want["drawn"][source])]
    assert not other, f"after the block other numbers than without it come from {', '.join(other)}: put each state back"
    for name, value in want["after"].items():
        assert got["after"][name] == value, f"after the block {name} is {got['after'][name]!r}, before it was {value!r}"


@exercise(DETERMINISM, kind="property")
def test_only_deterministic_algorithms_run_within(run, rng):
    settings = run(probes.block_effects, rng.integers(1, 999), True, False)["within"]
    assert settings["deterministic"], "torch.use_deterministic_algorithms is not on"
    assert not settings["warn only"], (
        "operators that are not deterministic only warn within the block, as they did before it: switch it on there, "
        "torch.use_deterministic_algorithms(True) without warn_only"
    )
    assert not settings["cudnn.benchmark"], "cuDNN chooses algorithms by timing them: other runs, other algorithms"
    cublas = settings["CUBLAS_WORKSPACE_CONFIG"]
    assert cublas == ":4096:8", f"CUBLAS_WORKSPACE_CONFIG is {cublas!r} within the block, expected ':4096:8'"
