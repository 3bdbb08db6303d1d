"""What README, CITATION.cff and the devcontainer say is what the kit is."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest
import yaml

from lab.assignment import ROOT, default
from lab.questions import default as questions

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("stage", default().stages, ids=lambda s: s.name)
def test_the_table_of_stages_is_the_assignment(stage):
    mine = default().of_stage(stage.name)
    row = [stage.name, len(mine), sum(e.points for e in mine), sum(e.hours for e in mine)]
    assert "| `{}` | {} | {:g} | {:g} | ".format(*row) in README
    assert {q.stage for q in questions().questions.values()} >= {stage.name}


@pytest.mark.parametrize(
    ("name", "says"), [("core", "`core` is {} exercises in {:g} hours"), ("short", "`short` {} in {:g}")]
)
def test_what_it_says_of_profiles_is_so(name, says):
    ids = default().profiles[name]
    assert says.format(len(ids), sum(default().exercise(id).hours for id in ids)) in README


def test_what_was_not_run_are_the_exercises_that_want_a_gpu():
    not_run = re.search(r"Not run at all:(.*?)\n\n", README, re.DOTALL)[1]
    wanting = {e.id for e in default().exercises.values() if e.track == "gpu"}
    assert set(re.findall(r"`([a-z_]+\.[a-z_]+)`", not_run)) == wanting | {
        "benchmarks.attention",
        "benchmarks.mixed_precision",
    }
    assert not re.findall(r"H100|H200|A100", "".join(p.read_text() for p in (ROOT / "benchmarks/results").glob("*.md")))


def test_its_front_is_three_pictures_and_they_are_small():
    front = README.partition("\n## ")[0]
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    assert len(re.findall(r"!\[", front)) == 3 == len(pictures)
    for alt, path in pictures:
        assert len(alt) > 40, f"{path}: say what is to be seen"
        assert (ROOT / path).stat().st_size <= 150 * 1024, f"{path} is too large to be committed"
    kept = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "handout/images").glob("*.*") if p.suffix in (".png", ".svg")
    }
    assert kept >= {path for _, path in pictures}


def test_no_item_of_a_list_is_a_page():
    for item in re.findall(r"(?m)^- .*(?:\n  .*)*", README):
        assert len(item.split()) <= 60, f"{len(item.split())} words: {item}"


def test_every_file_of_versions_has_the_same():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited), "what the format asks for"
    assert cited["version"] == PROJECT["version"] == default().version
    assert re.search(r"(?m)^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1] == cited["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["title"].lower() == PROJECT["name"]


def test_the_devcontainer_says_make_env_on_a_python_that_is_supported():
    told = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    python = re.search(r"python:(\d+)\.(\d+)", told["image"]).groups()
    assert [*map(int, python)] >= [*map(int, PROJECT["requires-python"].removeprefix(">=").split("."))]
    made = ["make", "-n", *told["postCreateCommand"].removeprefix("make ").split()]
    assert subprocess.run(made, cwd=ROOT, capture_output=True).returncode == 0
    extras = re.search(r"EXTRAS=(\S+)", told["postCreateCommand"])[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
