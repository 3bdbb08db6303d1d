"""What a *runs* link points to runs: an exercise's first test on the reference, a script under torchrun.

Calls run when the page is made; tests/kit/test_glossary.py holds the page to them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from handout.make_glossary import is_call, terms
from lab.course.assignment import ROOT, default

LINKS = dict.fromkeys(t.link for t in terms() if t.depth == "runs" and not is_call(t.link))
EXERCISES = [link for link in LINKS if link in default().exercises]
HERE = [id for id in EXERCISES if default().exercises[id].track == "cpu" or torch.cuda.is_available()]
SCRIPTS = [link for link in LINKS if link not in EXERCISES]


def test_each_exercise_that_is_linked_passes_a_test():
    command = [sys.executable, "-m", "pytest", "tests", "--impl", "reference", "-rN", "-p", "tests.docs.first_of_each"]
    asked = [word for id in HERE for word in ("--exercise", id)]
    said = subprocess.run([*command, *asked], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert said.returncode == 0, said.stdout[-3000:]
    assert f"\n{len(HERE)} passed, " in said.stdout, said.stdout[-3000:]


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_that_is_linked_ends_well(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / script)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr[-2000:]
    assert "wrong:" not in said.stdout
    assert "ranks [0, 1]" in said.stdout
