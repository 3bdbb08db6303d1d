"""How many programs a multiprocessor holds.

Must hold: programs, warps, share and the limiting resource are those of a count that adds one program at a time, for
any kernel and any limits. Typical fakes: a formula for one resource (caught because each of the four limits some
cases); no rounding to the allocation units of registers and shared memory (caught by cases in which rounding matters);
H100's numbers in place of the given multiprocessor's.
"""

import itertools
import math

import pytest

from lab.course.listing import inputs
from lab.harness.calls import refused
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_steps as probes

OCCUPANCY = "flash_attention.occupancy"
H100 = {
    "warps": 64, "programs": 32, "registers": 65_536, "register_unit": 256,
    "shared_bytes": 228 * 1024, "shared_unit": 128, "shared_reserved": 1024,
}  # fmt: skip
ORDER = ("warps", "programs", "registers", "shared memory")
WHY = {
    "programs": "the smallest of what four resources allow; registers are rounded up for each warp, shared memory for "
    "each program, with what the system reserves",
    "warps": "the programs that fit, times the warps of each",
    "share": "warps at a time, of the multiprocessor's warps",
    "limited_by": f"what does not suffice for one more program, the first in the order {', '.join(ORDER)}",
}


def counted(case: dict) -> dict:
    """The expected result: add programs while one more fits."""
    m, warps = case.get("limits", H100), case["warps"]

    def round_up(amount: int, unit: str) -> int:
        return math.ceil(amount / m[unit]) * m[unit]

    demand = {
        "warps": warps, "programs": 1, "registers": warps * round_up(32 * case["registers"], "register_unit"),
        "shared memory": round_up(case["shared_bytes"] + m["shared_reserved"], "shared_unit"),
    }  # fmt: skip
    free, programs = {n: m["shared_bytes" if n == "shared memory" else n] for n in ORDER}, 0
    while all(free[n] >= demand[n] for n in ORDER):
        free, programs = {n: free[n] - demand[n] for n in ORDER}, programs + 1
    first = next(n for n in ORDER if free[n] < demand[n])
    return {
        "programs": programs, "warps": programs * warps, "share": programs * warps / m["warps"], "limited_by": first,
    }  # fmt: skip


def kernel(rng) -> dict:
    return {
        "registers": rng.integers(1, 255), "warps": rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 16]),
        "shared_bytes": rng.choice([0, rng.integers(1, 9000), rng.integers(9000, 230_000)]),
    }  # fmt: skip


def multiprocessor(rng) -> dict:
    return {
        "warps": rng.integers(16, 96), "programs": rng.integers(8, 32), "registers": 1024 * rng.integers(16, 128),
        "register_unit": rng.choice([64, 128, 320, 512]), "shared_bytes": 1024 * rng.integers(32, 300),
        "shared_unit": rng.choice([64, 200, 256, 1000]), "shared_reserved": rng.choice([256, 512, 2000]),
    }  # fmt: skip


def select(draw, condition, count: int) -> list[dict]:
    """Draw cases until `condition` holds for `count` of them; return these."""
    return [*itertools.islice(filter(condition, (draw() for _ in range(100_000))), count)]


def check(run, cases: list[dict]) -> None:
    assert cases
    for case, got in zip(cases, run(probes.occupancies, cases), strict=True):
        for name, value in counted(case).items():
            measured(f"{name} of a drawn kernel", got[name], value)
            same = abs(got[name] - value) <= 1e-12 if name == "share" else got[name] == value
            assert same, f"{name}: expected {value}, got {got[name]}: {WHY[name]}{inputs(case)}"


@exercise(OCCUPANCY, kind="numerics")
@pytest.mark.parametrize("limit", ORDER)
def test_each_limit_on_an_h100(run, rng, limit):
    light = {"registers": rng.integers(1, 24), "shared_bytes": rng.integers(0, 300)}  # so that no other limit binds
    overrides = {"warps": light, "programs": light | {"warps": 1}}.get(limit, {})
    check(run, select(lambda: kernel(rng) | overrides, lambda case: counted(case)["limited_by"] == limit, 20))


@exercise(OCCUPANCY, kind="numerics")
def test_any_multiprocessor(run, rng):
    check(run, [kernel(rng) | {"limits": multiprocessor(rng)} for _ in range(200)])


@exercise(OCCUPANCY, kind="numerics")
@pytest.mark.parametrize("unit", ["register_unit", "shared_unit", "shared_reserved"])
def test_registers_and_shared_memory_come_in_units(run, rng, unit):
    """Cases in which rounding, or reserved memory, changes the number of programs."""
    finer = {unit: 0 if unit == "shared_reserved" else 1}

    def matters(case: dict) -> bool:
        return counted(case | {"limits": case["limits"] | finer})["programs"] != counted(case)["programs"]

    for limits in (lambda: H100, lambda: multiprocessor(rng)):
        check(run, select(lambda limits=limits: kernel(rng) | {"limits": limits()}, matters, 10))


@exercise(OCCUPANCY, kind="numerics")
def test_a_program_that_fits_to_the_last_byte_and_one_that_does_not(run, rng):
    """Shared memory and registers that fill the multiprocessor exactly, exceed it by one, or exceed it by far."""
    programs, warps = rng.integers(2, 7), rng.choice([2, 4, 8])
    smem = H100["shared_bytes"] // programs // 128 * 128 - 1024
    regs = H100["registers"] // (programs * warps) // 256 * 8
    sizes = [
        *((32, 1, smem + extra) for extra in (-1, 0, 1)), *((min(regs + extra, 255), warps, 0) for extra in (-1, 0, 1)),
        *((rng.integers(10, 60), 4, 227 * 1024 + extra) for extra in (0, rng.integers(1, 9000))),
        (rng.integers(10, 30), rng.integers(65, 90), 0), (rng.integers(200, 255), rng.integers(12, 40), 0),
        (255, rng.integers(65, 90), 300_000),
    ]  # fmt: skip
    check(run, [dict(zip(("registers", "warps", "shared_bytes"), size, strict=True)) for size in sizes])


@exercise(OCCUPANCY, kind="numerics")
def test_the_first_of_several_limits_is_named(run, rng):
    """Two to four resources run out at the same number of programs."""
    cases = []
    for _ in range(60):
        tied = rng.shuffled(ORDER)[: rng.integers(2, 4)]
        programs, warps, registers = rng.integers(1, 9), rng.integers(1, 8), 8 * rng.integers(1, 30)
        shared = 1024 * rng.integers(1, 20)
        factor = {n: 1 if n in tied else 2 for n in ORDER}
        limits = H100 | {
            "warps": programs * warps * factor["warps"], "programs": programs * factor["programs"],
            "registers": programs * warps * 32 * registers * factor["registers"],
            "shared_bytes": programs * (shared + 1024) * factor["shared memory"],
        }  # fmt: skip
        cases.append({"registers": registers, "warps": warps, "shared_bytes": shared, "limits": limits})
    check(run, cases)


@exercise(OCCUPANCY, kind="numerics")
def test_impossible_kernel_resources_are_refused(run, rng):
    good = {"registers": rng.integers(1, 255), "shared_bytes": rng.integers(0, 9000), "warps": rng.integers(1, 8)}
    bad = {
        "registers": [0, -rng.integers(1, 9), 256, 999],
        "shared_bytes": [-1, -99],
        "warps": [0, -rng.integers(1, 9)],
    }
    wrong = [{name: value} for name, values in bad.items() for value in values]
    cases = [[*(good | each).values()] for each in wrong]  # by position: registers, shared_bytes, warps
    for each, got in zip(wrong, run(refused, "impl.flash_attention.occupancy.occupancy", cases), strict=True):
        assert got == "ValueError", f"{each}: expected ValueError, got {got}"
    check(run, [good | edge for edge in ({"registers": 1}, {"registers": 255}, {"shared_bytes": 0}, {"warps": 1})])
