"""The mesh chapter's table of best meshes agrees with the planner (half a minute for 405B on 512 devices)."""

import re

import pytest

from lab.cluster.hardware import cluster
from lab.cluster.jobs import MODELS, Job
from lab.course.assignment import ROOT
from reference.mesh.planner import planner

SIZES = ("8b", "70b", "405b")
TABLE = (ROOT / "handout" / "mesh.md").read_text(encoding="utf-8").partition("| H100s | 8B | 70B | 405B |")[2]


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("devices", [8, 64, 512, 4096])
def test_chapter_table_of_best_meshes_matches_planner(model, devices):
    cells = re.search(rf"(?m)^\| {devices:,} \| (.+) \|$", TABLE)[1].split(" | ")
    want = dict(zip(SIZES, cells, strict=True))[model]
    job = Job(MODELS[model], 1024, 8192, cluster("dgx-h100", devices))
    if want == "nothing fits":
        with pytest.raises(ValueError, match=want):
            planner(job, 1)
    else:
        plan = planner(job, 1)[0].plan
        assert want == f"{plan.data:,} · {plan.pipe} · {plan.tensor}, ZeRO {plan.zero}"
