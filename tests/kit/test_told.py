"""What a student is asked is told before: by name in the stub, in words in the chapter."""

from __future__ import annotations

import re

import pytest

from lab.assignment import ROOT, default

STAGES = [s.name for s in default().stages]


@pytest.mark.parametrize("stage", STAGES)
def test_every_name_that_a_probe_asks_for_is_in_its_stub(stage):
    asked = set()
    for probes in (ROOT / "tests" / stage).glob("*.py"):
        asked |= set(re.findall(r"\bimpl\.(\w+)\.(\w+)\.(\w+)", probes.read_text(encoding="utf-8")))
    assert asked
    for folder, module, name in asked:
        stub = (ROOT / "student" / folder / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", stub), f"tests ask for {folder}/{module}.py:{name}, and the stub has none"


@pytest.mark.parametrize("exercise", default().exercises.values(), ids=lambda e: e.id)
def test_its_section_says_what_is_measured(exercise):
    chapter = (ROOT / "handout" / f"{exercise.stage}.md").read_text(encoding="utf-8")
    section = chapter.split(f"## Exercise `{exercise.id}`")[1].split("\n## ")[0]
    assert "**What is measured.**" in section
