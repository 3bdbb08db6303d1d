"""A run on two machines loses one, continues, and gets it back. Machines are network namespaces with a throttled link.

tests/kit/test_slurm.py tests that Slurm queues a job again if it lost its node.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lab.course.assignment import ROOT

from . import pages

NAME, GUIDE = "examples/cluster/two_machines.sh", ROOT / "handout" / "cluster.md"
SCRIPT = str(ROOT / NAME)
PATIENCE_S = 600.0
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
TRAIN = ["--fsdp", "--impl", "reference", "--steps", "120", "--save-every", "5"]  # the guide's options, on one machine


@pytest.fixture
def machines() -> Iterator[None]:
    """Create both namespaces, and remove them after the test."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("two machines need root and iproute2")
    if subprocess.run([SCRIPT, "up"], capture_output=True).returncode:
        subprocess.run([SCRIPT, "down"], capture_output=True)
        pytest.skip("this kernel gives no network namespaces, or no veth")
    yield
    subprocess.run([SCRIPT, "down"], check=True)


def test_cluster_run_survives_loss_and_return_of_a_machine(machines, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    commands = [c.text for c in pages.steps(GUIDE) if isinstance(c, pages.Command) and c.needs == "root"]
    assert (commands[0], commands[-1]) == (f"{NAME} up", f"{NAME} down")  # the fixture runs these two
    script = "\n".join(commands[1:-1]).replace(".cache/two", str(folder))
    with log.open("w") as output:
        done = subprocess.run(
            ["bash", "-ec", script], cwd=ROOT, stdout=output, stderr=output, env=ENVIRONMENT, timeout=PATIENCE_S
        )
    assert done.returncode == 0, log.read_text()[-2000:]
    assert log.read_text().count("resumed behind step") == 2, log.read_text()[-2000:]
    saved = json.loads((folder / "checkpoint" / "index.json").read_text())["files"]
    assert len(saved) == 2, "the run ended before the second machine was back: more --steps"
    alone = [sys.executable, "-m", "lab.train", *TRAIN, "--folder", str(tmp_path / "alone")]
    subprocess.run(alone, cwd=ROOT, check=True, capture_output=True)
    got, want = (json.loads((path / "losses.json").read_text()) for path in (folder, tmp_path / "alone"))
    assert got == pytest.approx(want, rel=1e-4), "the losses are not those of a run on one machine"
