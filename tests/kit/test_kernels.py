"""Instruments for Triton kernels: memory accesses in the interpreter, and machine code for a GPU."""

import pytest
import torch

from lab.course.assignment import ROOT, default
from lab.harness.runner import Executor, ProbeFailed
from lab.standins import source
from tests.flash_attention.probes_kernels import ranges
from tests.flash_attention.test_causal import brute

from . import probes_triton as probes


def test_loads_and_stores_by_program_and_row(runner):
    got = runner.run(probes.watched, 40)
    assert torch.equal(got["y"].flatten(), 2 * torch.arange(40.0))
    rows = [[0, [0, 1, 2, 3]], [1, [4, 5, 6, 7]], [2, [8, 9]]]  # masked rows are not accessed
    assert got["loads"] == got["stores"] == rows
    assert got["launches"] == [["double", [3]]]
    assert got["operators"] == ["fill_"], "of torch's, those outside of launches alone"
    assert got["races"] == 0


FILE = "flash_attention/weighted_sum_forward.py"
UNMASKED = """
import triton
import triton.language as tl

def weighted_sum_forward(x):
    double[(2,)](x, BLOCK=16)

@triton.jit
def double(x, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offs, 2 * tl.load(x + offs))
"""


def test_out_of_bounds_access_is_reported_with_its_kernel_line(solution):
    with pytest.raises(ProbeFailed) as error:
        solution(UNMASKED, FILE).run(probes.solved)
    assert error.value.text.startswith("OutOfBounds: program (1, 0, 0) of double: a load"), "not Triton's words for it"
    assert error.value.text.count("leaves the tensors") == 1
    assert error.value.where.endswith(":11 in double: tl.store(x + offs, 2 * tl.load(x + offs))")


def test_a_kernel_that_calls_python_is_refused(solution):
    code = UNMASKED.replace("x + offs, 2 * tl", "x + offs, twice() * tl") + "\n\ndef twice():\n    return 2\n"
    with pytest.raises(ProbeFailed, match="NotTriton: double calls twice, which is no function of Triton's"):
        solution(code, FILE).run(probes.solved)


def test_a_race_is_seen_though_the_interpreter_runs_programs_in_turn(runner):
    total, races, atomics = runner.run(probes.added, False)
    assert (total, atomics) == (64.0, 0)
    assert races > 0
    assert runner.run(probes.added, True) == [64.0, 0, 4]


@pytest.mark.parametrize("is_causal", [False, True])
def test_overlap_kernel_spills_no_registers_on_ampere(runner, is_causal):
    runner.executor = Executor(ROOT / "reference")
    assert runner.run(probes.spilled, 80, is_causal, triton="native", timeout=120) == 0


def test_key_range_stand_in_is_correct_but_not_tight(runner):
    """Kernels that use it still visit tiles with and without a mask. A copy of it earns no points for key ranges."""
    runner.executor, causal = Executor(ROOT / "reference"), "flash_attention.causal"
    cases = [
        [i, *lengths, 64, 32, is_causal]
        for i in (0, 1, 2) for lengths in ((150, 190), (190, 150)) for is_causal in (False, True)
    ]  # fmt: skip
    found = runner.run(ranges, cases, replace={default().exercise(causal).object: source(causal)})
    for case, (full, end) in zip(cases, found, strict=True):
        full_limit, end_limit = brute(*case)
        assert full % 32 == 0, case
        assert full <= full_limit, f"{case}: some row does not see all of it"
        assert end >= end_limit, f"{case}: some row sees more"
        assert full < full_limit or not full_limit, f"{case}: this is the answer"
    assert any(full for full, _ in found), "no kernel would walk without a mask"
    assert any(end > brute(*case)[1] for case, (_, end) in zip(cases, found, strict=True)), "this is the answer"
