"""The scripts that a *runs* link points to end well under torchrun.

Exercises that are linked pass in the stages' own tests; calls run when the page is made, and tests/kit/test_glossary.py
holds the page to them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from handout.make_glossary import is_call, terms
from lab.course.assignment import ROOT, default

LINKS = dict.fromkeys(t.link for t in terms() if t.depth == "runs" and not is_call(t.link))
SCRIPTS = [link for link in LINKS if link not in default().exercises]


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_that_is_linked_ends_well(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / script)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr[-2000:]
    assert "wrong:" not in said.stdout
    assert "ranks [0, 1]" in said.stdout
