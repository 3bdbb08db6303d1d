"""The fastest plan for a job, and what limits it.

Must hold: no plan that fits in memory is faster than the chosen one. The planner prices no plan that could not change
its choice. If no plan fits, a one-line error names the plan that needs the least memory.
Typical fakes: a rule of thumb ("tensor within a node, ZeRO 1, powers of two") that is right for the jobs its author
tried (caught by random prices, floors and memory, and an oracle that tries all plans); pricing all plans; pricing only
the few with the lowest floors; ignoring memory, or the reserved part of it.
"""

import itertools
from dataclasses import replace

import pytest

from lab.cluster import steps
from lab.cluster.hardware import RESOURCES
from lab.cluster.jobs import RECOMPUTE, Job, Plan, unfit
from lab.course.listing import inputs
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_planner as probes

PLANNER = "mesh.planner"
RELATIVE = 1e-9


def draw(rng, max_gpus: int = 64) -> dict:
    gpus = rng.choice([n for n in (2, 4, 8, 16, 24, 32, 64) if n <= max_gpus])
    heads = 2 ** rng.integers(2, 5) * rng.choice([1, 3])
    gated = rng.choice([True, False])
    return {
        "model": {
            "layers": rng.integers(3, 16), "width": 64 * heads, "heads": heads, "kv_heads": heads // rng.choice([1, 2]),
            "hidden": 48 * 64, "vocabulary": 96 * 64, "gated": gated, "positions": 0 if gated else 128,
            "tied": not gated,
        },
        "cluster": rng.choice(["dgx-a100", "hgx-h200"]), "gpus": gpus, "context": 128,
        "sequences": gpus * rng.choice([1, 2, 3, 4]), "recipe": rng.choice(["today", "2021"]),
        "drawn": True, "seed": str(rng.integers(0, 10**9)), "room": 7e8 / 8e10 * rng.uniform(0.6, 1.2),
        "keep": rng.integers(1, 4),
    }  # fmt: skip


def all_plans(case: dict) -> list[Plan]:
    """Return all valid plans, found by trying every combination."""
    job = probes.job_of(case)
    gpus = [n for n in range(1, case["gpus"] + 1) if case["gpus"] % n == 0]
    meshes = [(d, p, t) for d, p, t in itertools.product(gpus, gpus, gpus)
              if d * p * t == case["gpus"]]  # fmt: skip
    batches = [(mesh, m) for mesh in meshes for m in range(1, 17) if job.sequences % (mesh[0] * m) == 0]
    options = itertools.product(batches, range(1, 9), RECOMPUTE, range(4))
    plans = (Plan(*mesh, m, chunks, recompute, zero) for (mesh, m), chunks, recompute, zero in options)
    return [plan for plan in plans if not (probes.unfit if case["drawn"] else unfit)(job, plan)]


def costs_of(case: dict, job: Job, plan: Plan) -> tuple[float, float, float]:
    """Return (floor, price, memory) of a plan."""
    if case["drawn"]:
        return probes.drawn(case["seed"], job, plan)
    return steps.floor_s(job, plan), steps.price(job, plan).step_s, steps.memory(job, plan)["total"]


def capacity(case: dict, job: Job) -> float:
    return (case["room"] if case["drawn"] else 1 - steps.RESERVED) * job.cluster.device.hbm_bytes


def fastest(case: dict, job: Job | None = None) -> list[tuple[float, Plan, float]]:
    """Return (seconds, plan, memory) of all plans that fit, fastest first."""
    job = job or probes.job_of(case)
    priced, limit = [(plan, *costs_of(case, job, plan)) for plan in all_plans(case)], capacity(case, job)
    return sorted((price, plan, size) for plan, _, price, size in priced if size <= limit)


def draw_several(rng, count: int, max_gpus: int = 64, **changes) -> list[dict]:
    """Draw `count` cases; return those in which some plan fits."""
    cases = [draw(rng, max_gpus) | changes for _ in range(count)]
    return [case for case in cases if fastest(case)]


@exercise(PLANNER, kind="numerics")
def test_candidates_are_all_plans_and_each_once(run, rng):
    cases = [draw(rng, max_gpus=32) for _ in range(5)]
    wide = {**draw(rng), "gpus": 32, "sequences": 96}  # tensor may be 16 and 32, micro-batches 3
    wide["model"] = wide["model"] | {"heads": 32, "kv_heads": 32, "width": 2048}
    cases.append(wide)
    for case, got in zip(cases, run(probes.listed, cases), strict=True):
        plans = [Plan(*plan) for plan in got]
        duplicates = {plan for plan in plans if plans.count(plan) > 1} if len(set(plans)) < len(plans) else None
        assert not duplicates, f"more than once: {min(duplicates)}{inputs(case)}"
        want = set(all_plans(case))
        missing, extra = want - set(plans), set(plans) - want
        assert not missing | extra, (
            f"{len(missing)} plans are missing and {len(extra)} too many, as {min(missing | extra)}{inputs(case)}"
        )


@exercise(PLANNER, kind="numerics")
@pytest.mark.parametrize("keep", [1, 5, 100_000])
def test_no_plan_that_fits_is_faster(run, rng, keep):
    """Prices are random: any plan can be the fastest."""
    cases = draw_several(rng, 6, keep=keep)
    for case, (got, _) in zip(cases, run(probes.planned, cases), strict=True):
        want = fastest(case)[:keep]
        assert len(got) == len(want), (
            f"{len(want)} plans fit into tools.room(job) and were asked for, got {len(got)}: a floor above the best "
            f"price is no reason to stop before as many are found as are to be kept{inputs(case)}"
        )
        for index, ((plan, step_s, size), (price, best, need)) in enumerate(zip(got, want, strict=True)):
            what = f"choice {index}: expected {best} with {price:.6g} s, got {Plan(*plan)} with {step_s:.6g} s"
            assert Plan(*plan) == best, (
                f"{what}: a faster plan that fits was left out, or one that does not fit was taken (floors are no "
                f"order of prices){inputs(case)}"
            )
            assert abs(step_s - price) <= RELATIVE * price, f"{what}{inputs(case)}"
            assert abs(size - need) <= RELATIVE * need, (
                f"memory of {best}: expected {need:.6g}, got {size:.6g}{inputs(case)}"
            )


@exercise(PLANNER, kind="numerics")
def test_a_real_job_gets_its_fastest_plan(run, rng):
    """A node of eight devices, real prices, and a model that does not fit on one device."""
    model = {"layers": 4, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 32768}
    case = draw(rng) | {
        "drawn": False, "model": model, "gpus": 8, "sequences": 8, "context": 1024 * rng.integers(1, 4),
        "cluster": "dgx-a100", "recipe": "today", "keep": 3,
    }  # fmt: skip
    ((got, _),) = run(probes.planned, [case])
    want = fastest(case)[:3]
    assert [round(s, 12) for _, s, _ in got] == [round(s, 12) for s, _, _ in want], (
        f"expected {[f'{s:.6g} s: {plan}' for s, plan, _ in want]}, got {[(s, plan) for plan, s, _ in got]}"
        f"{inputs(case)}"
    )


@exercise(PLANNER, kind="numerics")
def test_what_binds_is_what_saves_most_when_doubled(run, rng):
    share = 3.5e8 / 8e10  # one plan in seven fits; with twice the memory, one in two
    cases = draw_several(rng, 4, max_gpus=32, cluster="dgx-a100", room=share)
    for case, got in zip(cases, run(probes.bound, cases), strict=True):
        job, (now, plan, _) = probes.job_of(case), fastest(case)[0]
        assert set(got) == set(RESOURCES), f"expected {', '.join(RESOURCES)}, got {', '.join(got)}"
        for resource in RESOURCES:
            faster = replace(job, cluster=job.cluster.faster(resource))
            then = fastest(case, faster)[0][0] if resource == "memory" else costs_of(case, faster, plan)[1]
            want = max(0.0, 1 - then / now)
            assert abs(got[resource] - want) <= 1e-9, (
                f"twice as much of {resource} saves {want:.4g} of the step, got {got[resource]:.4g}"
                + (": with more memory another plan may be the fastest" if resource == "memory" else "")
                + inputs(case)
            )


@exercise(PLANNER, kind="numerics")
def test_invalid_inputs_are_refused_in_one_line(run, rng):
    small = draw(rng, max_gpus=16) | {"room": 1e8 / 8e10}
    idle = draw(rng) | {"gpus": 64, "sequences": 1}
    idle["model"] = idle["model"] | {"layers": 1, "heads": 4, "kv_heads": 4, "width": 256, "hidden": 256}
    cases, job = [small, idle, draw(rng) | {"keep": 0}], probes.job_of(small)
    minimum, leanest = min((costs_of(small, job, plan)[2], plan) for plan in all_plans(small))
    why = [
        f"nothing fits: the least that a plan needs is {minimum:.4g} bytes, with room for {capacity(small, job):.4g}",
        "no plan has that many GPUs busy", "keep is 0",
    ]  # fmt: skip
    for case, cause, got in zip(cases, why, run(probes.refused, cases), strict=True):
        assert got.startswith("ValueError: "), f"{cause}: expected a ValueError, raised {got}{inputs(case)}"
        assert "\n" not in got, f"expected one line, got {got!r}"
        if case is small:
            assert str(leanest) in got, f"expected the plan that needs least, {leanest}, named in {got!r}"
            numbers = [f"{x / 1e9:.1f}" for x in (minimum, capacity(small, job))]
            assert all(n in got for n in numbers), f"expected {' and '.join(numbers)} GB named in {got!r}"
        assert case is not idle or "no" in got.lower().split(), f"{cause}: expected that there is no plan, got {got!r}"


@exercise(PLANNER, kind="property")
def test_planner_prices_only_plans_it_could_return(run, rng):
    cases = draw_several(rng, 8)
    for case, (got, priced) in zip(cases, run(probes.planned, cases), strict=True):
        job = probes.job_of(case)
        last = max(step_s for _, step_s, _ in got) if len(got) == case["keep"] else float("inf")
        plans = [Plan(*plan) for plan in priced]
        measured("plans that are priced a second time", len(plans) - len(set(plans)), 0)
        assert len(plans) == len(set(plans)), f"{len(plans) - len(set(plans))} plans were priced twice{inputs(case)}"
        for plan in plans:
            floor, _, size = costs_of(case, job, plan)
            assert size <= capacity(case, job), f"{plan} does not fit, and its price was asked for{inputs(case)}"
            assert floor <= last, (
                f"{plan} takes at least {floor:.6g} s, and the last that is returned {last:.6g}: its price "
                f"could not matter ({len(plans)} prices were asked for)"
                f"{inputs(case)}"
            )
