"""Runs a planner on given jobs, with the kit's tools or with random prices."""

import hashlib
from dataclasses import astuple, replace

from lab.cluster import jobs
from lab.cluster.hardware import cluster
from lab.cluster.jobs import MEGATRON_2021, TODAY, Job, Model, Plan
from lab.harness.raising import raised

RECIPES = {"today": TODAY, "2021": MEGATRON_2021}


def job_of(case: dict) -> Job:
    return Job(
        Model(**case["model"]), case["sequences"], case["context"], cluster(case["cluster"], case["gpus"]),
        RECIPES[case["recipe"]],
    )  # fmt: skip


def drawn(seed: str, job: Job, plan: Plan) -> tuple[float, float, float]:
    """Return random (floor, price, memory), unrelated to the mesh. A price has a term per rate of the cluster."""
    digest = hashlib.sha256(f"{seed} {plan}".encode()).digest()
    parts = [int.from_bytes(digest[i : i + 4], "big") / 2**32 for i in range(0, 28, 4)]
    c = job.cluster
    rates = (c.device.matmul_flops, c.device.hbm_bytes_per_s, c.inside.bytes_per_s, c.between.bytes_per_s)
    price = 0.1 + sum(part * 1e12 / rate for part, rate in zip(parts, rates, strict=False))
    huge = 1000 if parts[6] > 2 / 3 else 1  # more memory than any device has
    return price * (0.5 + 0.5 * parts[4]), price, (0.2 + parts[5]) * 1e9 * huge


def unfit(job: Job, plan: Plan) -> str:
    """Return why a plan is invalid when prices are random: the kit's reasons, and one more; "" if it is valid."""
    return jobs.unfit(job, plan) or "three of these may not meet" * (plan.zero == 3 and plan.chunks == 2)


def _tools(impl, case: dict, priced: list):
    tools = impl.mesh.planner.Tools()
    original = tools.price_s

    def price_s(job, plan):
        priced.append(list(astuple(plan)))
        return drawn(case["seed"], job, plan)[1] if case["drawn"] else original(job, plan)

    tools = replace(tools, price_s=price_s)
    if case["drawn"]:
        tools = replace(
            tools,
            unfit=unfit,
            floor_s=lambda job, plan: drawn(case["seed"], job, plan)[0],
            memory=lambda job, plan: drawn(case["seed"], job, plan)[2],
            room=lambda job: case["room"] * job.cluster.device.hbm_bytes,
        )
    return tools


def listed(impl, cases: list) -> list:
    """Return the candidates per case."""
    return [[list(astuple(p)) for p in impl.mesh.planner.candidates(job_of(c), _tools(impl, c, []))] for c in cases]


def planned(impl, cases: list) -> list:
    """Return per case the choices as [plan, seconds, memory], and all plans that were priced, in order."""
    results = []
    for case in cases:
        priced: list = []
        choices = impl.mesh.planner.planner(job_of(case), case["keep"], _tools(impl, case, priced))
        results.append([[[list(astuple(c.plan)), float(c.step_s), float(c.memory)] for c in choices], priced])
    return results


def bound(impl, cases: list) -> list:
    """Return per case, for its best choice, the share of the step that twice as much of each resource saves."""
    results = []
    for case in cases:
        job, tools = job_of(case), _tools(impl, case, [])
        best = impl.mesh.planner.planner(job, 1, tools)[0]
        results.append({str(k): float(v) for k, v in impl.mesh.planner.binds(job, best, tools).items()})
    return results


def refused(impl, cases: list) -> list:
    """Return the error per case, as text."""
    plan = impl.mesh.planner.planner
    return [raised(lambda c=c: plan(job_of(c), c["keep"], _tools(impl, c, [])), text=True) for c in cases]
