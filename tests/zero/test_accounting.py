"""Formulas for the memory and the traffic of ZeRO.

Must hold: for each stage, precision, size and number of ranks, bytes kept and sent equal the paper's formulas to the
byte, and equal those of torch's own sharded optimizer. Typical fakes: formulas that are right only where W divides (W
rarely divides the drawn sizes); total/W where whole tensors are given to ranks (one tensor outweighs the others); the
paper's example by heart (tests draw others).
"""

from fractions import Fraction

import pytest

from lab.harness.diagnose import in_parts
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_accounting as probes
from .oracles import shares

ACCOUNTING = "zero.accounting"
WHY = {
    "parameters": "whole in all stages but the third, in the dtype that computes",
    "gradients": "whole up to stage 1, a share from stage 2 on",
    "optimizer": "Adam's two numbers in float32, and a master beside them where parameters are 16 bits; a share, "
    "rounded up, from stage 1 on; zero1 gives out whole tensors, the largest first, and the fullest rank counts",
    "activations": "no stage of ZeRO divides them",
    "sent": "reduce-scatters and all-gathers of (W − 1) parts each, in zero2 and zero3 those of gradients and in zero3 "
    "two of parameters for every micro-batch; zero1 all-reduces gradients and broadcasts parameters",
    "total": "the sum of what is kept",
}


def draw_sizes(rng) -> list:
    return [rng.integers(1, 10 ** rng.integers(1, 5)) for _ in range(rng.integers(3, 9))]


def bytes_of(sizes, world, method, precision, activations, micro) -> dict:
    """Return the bytes by the formulas of the paper's sections 5 and 7. part: elements per rank, rounded up."""
    total, part = sum(sizes), (sum(sizes) + world - 1) // world
    item, state = (4, 8) if precision == "float32" else (2, 12)
    fullest = shares(sorted(sizes, reverse=True), world)[-1]
    reduced = Fraction(2 * (world - 1), world) * total
    counts = {
        "none": (total, total, total, reduced),
        "zero1": (total, total, fullest, reduced * Fraction(3, 2)),
        "p_os": (total, total, part, 2 * (world - 1) * part),
        "zero2": (total, part, part, (micro + 1) * (world - 1) * part),
        "zero3": (part, part, part, 3 * micro * (world - 1) * part),
    }[method]
    want = {"parameters": counts[0] * item, "gradients": counts[1] * item, "optimizer": counts[2] * state,
            "activations": activations}  # fmt: skip
    return {**want, "sent": int(counts[3] * item), "total": sum(want.values())}


def parts(sizes, world, precision) -> dict[str, int]:
    """Return bytes that a wrong formula may count too often, or omit."""
    total, share, item = sum(sizes), -(-sum(sizes) // world), 4 if precision == "float32" else 2
    return {
        "the parameters": item * total,
        f"the other ranks' {world - 1} parts of them": item * (world - 1) * share,
        "one rank's share of them": item * share,
        "one float32 number for each": 4 * total,
        "one float32 number for each of a rank's share": 4 * share,
        "the padding of the shares": item * (world * share - total) or total**2,
    }


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("method", ["none", "zero1", "p_os", "zero2", "zero3"])
def test_bytes_kept_and_sent(run, rng, method, precision):
    for world in (1, 2, rng.integers(3, 5), rng.integers(6, 70)):
        args = draw_sizes(rng), world, method, precision, rng.integers(0, 10**6), rng.integers(1, 5)
        got, want = run(probes.counted, *args), bytes_of(*args)
        for name, number in want.items():
            assert got[name] == number, (
                f"{name} of {args[0]} elements, {world} ranks, {method}, {precision}, {args[5]} micro-batches: "
                f"{got[name]:,.0f} bytes, expected {number:,}: {WHY[name]}"
                f"{in_parts(got[name], number, parts(args[0], world, precision))}"
            )


@exercise(ACCOUNTING, kind="numerics")
def test_the_papers_example(run):
    want = {"none": 120.0, "p_os": 31.4, "zero2": 16.6, "zero3": 1.9}
    for method, gigabytes in want.items():
        got = run(probes.counted, [7_500_000_000], 64, method, "mixed", 0, 1)["total"] / 1e9
        measured(f"the paper's 7.5 B on 64 ranks, {method}", got, gigabytes, "GB")
        assert abs(got - gigabytes) < 0.05, f"{method}: {got:.2f} GB a rank, figure 1 of the paper has {gigabytes}"


@exercise(ACCOUNTING, kind="property")
def test_zero1_is_what_torchs_sharded_optimizer_keeps_and_sends(run, rng):
    world = 2
    sizes = [rng.integers(2000, 3000), *[rng.integers(10, 900) for _ in range(rng.integers(3, 6))]]
    got = run(probes.counted, sizes, world, "zero1", "float32", 0, 1)
    ranks = run.trace(probes.measured, sizes, world=world)
    for name in ("parameters", "gradients", "optimizer"):
        largest = max(rank.values[name] for rank in ranks)
        measured(f"{name} that torch's sharded optimizer keeps", got[name], largest, "bytes")
        assert got[name] == largest, (
            f"{name} of {sizes} on {world} ranks: counted {got[name]:,.0f}, measured {largest:,} bytes"
        )
    (rows,) = ranks[0].cut(["step"])
    factors = {"all_reduce": 2, "broadcast": 1}
    sent = (world - 1) / world * sum(factors.get(row["op"], 0) * row["bytes"] for row in rows)
    measured("bytes that torch's sharded optimizer sends", got["sent"], sent, "bytes")
    assert abs(got["sent"] - sent) <= 1, f"{world} ranks: counted {got['sent']:,.0f} bytes sent, measured {sent:,.0f}"
