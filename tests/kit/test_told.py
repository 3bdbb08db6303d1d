"""What a student is asked is told before: by name in the stub, in words in the chapter."""

from __future__ import annotations

import re

import pytest
import torch

from lab.course.assignment import ROOT, default
from tests.benchmarking import test_straggler
from tests.mesh import test_route

STAGES = [s.name for s in default().stages]


@pytest.mark.parametrize("stage", STAGES)
def test_every_name_that_a_probe_asks_for_is_in_its_stub(stage):
    asked = set()
    for probes in (ROOT / "tests" / stage).glob("*.py"):
        asked |= set(re.findall(r"\bimpl\.(\w+)\.(\w+)\.(\w+)", probes.read_text(encoding="utf-8")))
    assert asked
    for folder, module, name in asked:
        stub = (ROOT / "student" / folder / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", stub), f"tests ask for {folder}/{module}.py:{name}, and the stub has none"


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        ("mixed_precision/loss_scaler.py", "`scale` is the factor that holds now: an attribute"),
        ("benchmarking/straggler.py", "The median of an even number is the mean of the middle two"),
        ("mesh/route.py", "0 where no rank has a token"),
    ],
)
def test_what_tests_read_beyond_signatures_is_in_the_docstring(stub, words):
    assert words in " ".join((ROOT / "student" / stub).read_text(encoding="utf-8").split())


def test_a_wrong_median_is_told_what_it_is_the_median_of():
    want = test_straggler.expected([[0.1], [0.4], [0.2], [0.3]])
    with pytest.raises(AssertionError, match=r"0\.1000, 0\.4000, 0\.2000, 0\.3000 s, .* the mean of the middle two"):
        test_straggler.check(want | {"slowdown": 0.4 / 0.2}, want, "rank 0")


def test_a_balance_of_no_tokens_is_told_of_the_division():
    want = {name: torch.zeros(()) for name in ("experts", "gates", "balance", "by_gates", "by_balance")}
    none = {"logits": torch.zeros(0, 4), "k": 1, "weights": torch.zeros(0, 1), "averaged_over": 0}
    with pytest.raises(AssertionError, match="divide by 0 tokens"):
        test_route.check(want | {"balance": torch.tensor(torch.nan)}, want, want, "no rank", [none])
