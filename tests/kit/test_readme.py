"""What README, the instructor's page, CITATION.cff and the devcontainer say is what the kit is."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest
import yaml

from lab.course.assignment import ASKS, ROOT, default
from lab.course.questions import default as questions
from lab.harness import mistakes

README = (ROOT / "README.md").read_text(encoding="utf-8")
HANDOUT = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "handout").glob("*.md")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SYLLABI = re.findall(r"### (\w+) weeks: profile `(\w+)`\n(.*?)(?=\n##)", HANDOUT["instructors"], flags=re.DOTALL)
WEEKS = {"Two": 2, "Four": 4, "Ten": 10}


@pytest.mark.parametrize("stage", default().stages, ids=lambda s: s.name)
def test_the_table_of_stages_is_the_assignment(stage):
    mine = default().of_stage(stage.name)
    row = [stage.name, len(mine), sum(e.points for e in mine), sum(e.hours for e in mine)]
    assert "| `{}` | {} | {:g} | {:g} | ".format(*row) in HANDOUT["instructors"]
    assert {q.stage for q in questions().questions.values()} >= {stage.name}


def test_what_it_says_of_profiles_is_so():
    ids, known = default().profiles["core"], default()
    says = f"`core`, {len(ids)} exercises in {sum(known.exercise(id).hours for id in ids):g} hours"
    assert says in " ".join(README.split())
    assert f"they have all {len(known.exercises)}" in README
    assert f"{len(known.exercises)} exercises, from" in README


def test_its_picture_of_a_failing_check_is_what_the_kit_says():
    picture = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1]
    naive = default().exercise("ddp.naive")
    when = mistakes.read("ddp")["when"]["sum-for-mean"]
    says = (
        f"{mistakes.SAYS}{when}.",
        f"numerics: {ASKS['numerics']}",
        f"hint: {naive.hints[0]}",
        f"student/{naive.file}",
    )
    for line in says:
        assert line in picture


def test_pictures_say_what_is_to_be_seen_and_are_small():
    for page, text in HANDOUT.items():
        for alt, path in re.findall(r"!\[([^\]]*)\]\((images/[^)]+)\)", text):
            assert len(alt) > 40, f"{page}, {path}: say what is to be seen"
            assert (ROOT / "handout" / path).stat().st_size <= 150 * 1024, f"{path} is too large to be committed"


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


def weeks(table: str) -> list[tuple[list[str], float]]:
    """(exercise ids, hours) of each row."""
    found = []
    for exercises, hours in re.findall(r"\| \d+ \| (.*?) \| ([\d.]+) \|", table):
        of_stage = (part.partition("`: ") for part in exercises.split("; "))
        found.append(([f"{s.strip('`')}.{n}" for s, _, names in of_stage for n in names.split(", ")], float(hours)))
    return found


@pytest.mark.parametrize(("count", "profile", "table"), SYLLABI, ids=[s[1] for s in SYLLABI])
def test_a_syllabus_is_its_profile_its_hours_add_up_and_nothing_comes_before_what_it_needs(count, profile, table):
    known, planned = default(), weeks(table)
    assert len(planned) == WEEKS[count]
    for ids, hours in planned:
        assert sum(known.exercise(id).hours for id in ids) == hours, f"the week of {ids[0]}"
    everything = [id for ids, _ in planned for id in ids]
    assert len(everything) == len(set(everything)), "an exercise is in two weeks"
    assert set(everything) == set(known.profiles[profile])
    for week, (ids, _) in enumerate(planned):  # stand-ins help who is stuck; a plan should not count on them
        later = {id for more, _ in planned[week + 1 :] for id in more}
        assert not [id for id in ids if later.intersection(known.exercise(id).needs)], f"week {week + 1}: too early"


def test_there_are_three_syllabi():
    assert [s[1] for s in SYLLABI] == ["short", "core", "full"]
