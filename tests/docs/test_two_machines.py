"""Two machines, as network namespaces with a throttled link: a run loses one, goes on, and gets it back."""

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
STEPS, PATIENCE_S = 120, 300.0
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
TRAIN = ["--fsdp", "--impl", "reference", "--steps", str(STEPS), "--save-every", "5"]


@pytest.fixture
def machines() -> Iterator[None]:
    """Both namespaces, while the test runs."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("two machines need root and iproute2")
    if subprocess.run([SCRIPT, "up"], capture_output=True).returncode:
        subprocess.run([SCRIPT, "down"], capture_output=True)
        pytest.skip("this kernel gives no network namespaces, or no veth")
    yield
    subprocess.run([SCRIPT, "down"], check=True)


def test_a_run_survives_the_loss_of_a_machine_and_takes_it_back_as_the_guide_types_it(machines, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    commands = [c.text for c in pages.steps(GUIDE) if isinstance(c, pages.Command) and c.needs == "root"]
    assert (commands[0], commands[-1]) == (f"{NAME} up", f"{NAME} down")  # both are the fixture's part
    script = "\n".join(commands[1:-1]).replace(".cache/two", str(folder))
    with log.open("w") as output:
        process = subprocess.Popen(["bash", "-ec", script], cwd=ROOT, stdout=output, stderr=output, env=ENVIRONMENT)
        try:
            assert process.wait(2 * PATIENCE_S) == 0, log.read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    assert log.read_text().count("resumed behind step") == 2, log.read_text()[-2000:]
    saved = json.loads((folder / "checkpoint" / "index.json").read_text())["files"]
    assert len(saved) == 2, "the run ended before the second machine was back: more --steps"
    alone = [*TRAIN, "--folder", str(tmp_path / "alone")]
    subprocess.run([sys.executable, "-m", "lab.train", *alone], cwd=ROOT, check=True, capture_output=True)
    got, want = (json.loads((f / "losses.json").read_text()) for f in (folder, tmp_path / "alone"))
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert worst < 1e-4, f"losses differ by up to {worst:.1e} from those of a run that nothing happened to"
