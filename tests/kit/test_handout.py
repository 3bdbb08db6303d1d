"""The chapters and README name existing things, and agree with assignment.toml and the kit."""

import doctest
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from handout.make_glossary import PAGE, page, terms
from lab.course.assignment import KIND_QUESTIONS, ROOT, default
from lab.course.questions import default as questions
from lab.harness import mistakes

CHAPTERS = [*sorted((ROOT / "handout").glob("*.md")), ROOT / "README.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HANDOUT = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "handout").glob("*.md"))}


def prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(path)))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(path))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.name)
def test_chapter_links_exercises_and_questions_exist(chapter):
    for target in (target for target in links(chapter) if not target.startswith("http")):
        path, hash, heading = target.partition("#")
        assert not target.startswith("#exercise-"), f"{chapter.name}: {target}: name the page; editions leave some out"
        file = (chapter.parent / path).resolve() if path else chapter
        assert file.exists(), f"{chapter.name}: {target} is not there"
        assert not hash or heading in anchors(file), f"{chapter.name}: {target}"
    stages, known = "|".join(s.name for s in default().stages), default().exercises | questions().questions
    for id in re.findall(rf"`((?:{stages})\.[a-z_0-9]+)`", chapter.read_text(encoding="utf-8")):
        assert id in known, f"{chapter.name} names {id}"


def test_glossary_page_is_current_and_its_terms_well_formed():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m handout.make_glossary"
    names = [t.term.casefold() for t in terms()]
    assert len(set(names)) == len(names) >= 139
    for term in terms():
        assert len(re.findall(r"[.!?:](?= |$)", term.text)) >= (2 if term.depth == "told" else 1), term.term
        assert term.depth != "told" or re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", term.link), term.term


def test_readmes_match_profiles_in_exercises_and_hours():
    page, known = HANDOUT["README"], default()
    rows = dict(re.findall(r"(?m)^\| \[[^\]]+\]\((\w+)\.md\) \| (.*\w\**) \|$", page.partition("`short` in bold |")[2]))
    names = [(f"{stage}.{name.strip('*')}", "**" in name) for stage, row in rows.items() for name in row.split(", ")]
    assert tuple(id for id, _ in names) == known.profiles["core"]
    assert tuple(id for id, bold in names if bold) == known.profiles["short"]
    for ids, words in (
        (known.exercises, "{} exercises in {:g} hours"),
        (known.profiles["core"], "`core` is {} of them in {:g} hours"),
        (known.profiles["short"], "`short` is {} in {:g} hours"),
    ):
        assert words.format(len(ids), sum(known.exercise(id).hours for id in ids)) in page
    core = known.profiles["core"]
    sentence = f"`core`, {len(core)} exercises in {sum(known.exercise(id).hours for id in core):g} hours"
    assert sentence in " ".join(README.split())
    assert f"they have all {len(known.exercises)}" in README
    assert f"{len(known.exercises)} exercises, from" in README


@pytest.mark.parametrize("exercise", default().exercises.values(), ids=lambda e: e.id)
def test_a_chapter_names_an_exercises_file_and_what_is_forbidden(exercise):
    text = HANDOUT[exercise.stage]
    assert f"student/{exercise.file}" in text
    for name in exercise.forbidden:
        assert f"`{name}`" in text, f"{name} is forbidden in {exercise.id}, and its chapter does not say so"


PARTS = ["Goal", "Write", "Steps", "What is measured"]


@pytest.mark.parametrize("chapter", [c for c, text in HANDOUT.items() if "**Goal.**" in text])
def test_exercise_sections_have_all_parts_in_order(chapter):
    for section in HANDOUT[chapter].split("\n## Exercise ")[1:]:
        heads = re.findall(r"(?m)^\*\*([A-Z][\w ]+?)\.?\*\*", section.partition("\n## ")[0])
        assert [h for h in heads if h in PARTS] == PARTS, section.partition("\n")[0]


@pytest.mark.parametrize("chapter", [c for c, text in HANDOUT.items() if "**Figure 2.**" in text])
def test_figures_are_numbered_as_they_appear_and_each_has_a_caption(chapter):
    text = HANDOUT[chapter]
    numbers = [int(n) for n in re.findall(r"(?m)^\*\*Figure (\d+)\.\*\* \S", text)]
    assert numbers == [*range(1, 1 + len(numbers))]
    assert len(numbers) >= 6 or chapter == "published"
    captioned = re.findall(r"!\[[^\]]{41,}\]\(images/\w+\.svg\)\n\n\*\*Figure \d", text)  # with a description
    assert len(captioned) == len(numbers) == text.count("](images/")
    assert {int(n) for n in re.findall(r"Figure (\d+)", text)} == set(numbers)
    assert not re.search(r"(?m)^%", text), "the site drops a line that begins with %, as a comment"


@pytest.mark.parametrize("chapter", [c for c, text in HANDOUT.items() if "```pycon" in text])
def test_sessions_print_what_the_chapter_says(chapter):
    fences = [t for t in MarkdownIt().parse(HANDOUT[chapter]) if t.type == "fence" and t.info == "pycon"]
    session = "\n".join(t.content for t in fences)
    output: list[str] = []
    test = doctest.DocTestParser().get_doctest(session, {}, chapter, f"{chapter}.md", 0)
    doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    assert test.examples
    assert not output, "".join(output)


def test_pictures_match_output_of_draw_py(tmp_path):
    script = ROOT / "handout" / "images" / "draw.py"
    folders = ["--out", str(tmp_path), "--numbers", str(tmp_path)]
    subprocess.run([sys.executable, str(script), *folders], check=True, cwd=ROOT)
    saved = {p.name: p for folder in ("images", "site/moving") for p in (ROOT / "handout" / folder).glob("*.*[gn]")}
    drawn = sorted(tmp_path.glob("*.*"))
    assert len(drawn) > 20
    stale = [p.name for p in drawn if p.name not in saved or saved[p.name].read_bytes() != p.read_bytes()]
    assert not stale, "run python handout/images/draw.py"


@pytest.mark.parametrize("stage", [s.name for s in default().stages])
def test_stubs_contain_every_name_that_probes_use(stage):
    names = set()
    for probes in (ROOT / "tests" / stage).glob("*.py"):
        names |= set(re.findall(r"\bimpl\.(\w+)\.(\w+)\.(\w+)", probes.read_text(encoding="utf-8")))
    assert names
    for folder, module, name in names:
        stub = (ROOT / "student" / folder / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"\b{name}\b", stub), f"tests ask for {folder}/{module}.py:{name}, and the stub has none"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SYLLABI = re.findall(r"### (\w+) weeks: profile `(\w+)`\n(.*?)(?=\n##)", HANDOUT["instructors"], flags=re.DOTALL)
WEEKS = {"Two": 2, "Four": 4, "Ten": 10}


@pytest.mark.parametrize("stage", default().stages, ids=lambda s: s.name)
def test_stage_table_matches_assignment(stage):
    exercises = default().of_stage(stage.name)
    row = [stage.name, len(exercises), sum(e.points for e in exercises), sum(e.hours for e in exercises)]
    assert "| `{}` | {} | {:g} | {:g} | ".format(*row) in HANDOUT["instructors"]
    assert {q.stage for q in questions().questions.values()} >= {stage.name}


def test_readme_example_failure_matches_kit_messages():
    picture = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1]
    naive = default().exercise("ddp.naive")
    condition = mistakes.read("ddp")["when"]["sum-for-mean"]
    lines = (
        f"{mistakes.SAME_WHEN}{condition}.",
        f"numerics: {KIND_QUESTIONS['numerics']}",
        f"hint: {naive.hints[0]}",
        f"student/{naive.file}",
    )
    for line in lines:
        assert line in picture


def test_version_license_and_title_agree_across_files():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited), "what the format asks for"
    assert cited["version"] == PROJECT["version"] == default().version
    assert re.search(r"(?m)^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1] == cited["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["title"].lower() == PROJECT["name"]


def test_devcontainer_has_supported_python_and_valid_make_command():
    config = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    python = re.search(r"python:(\d+)\.(\d+)", config["image"]).groups()
    assert [*map(int, python)] >= [*map(int, PROJECT["requires-python"].removeprefix(">=").split("."))]
    command = ["make", "-n", *config["postCreateCommand"].removeprefix("make ").split()]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    extras = re.search(r"EXTRAS=(\S+)", config["postCreateCommand"])[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def weeks(table: str) -> list[tuple[list[str], float]]:
    """Return (exercise ids, hours) of each row."""
    found = []
    for exercises, hours in re.findall(r"\| \d+ \| (.*?) \| ([\d.]+) \|", table):
        of_stage = (part.partition("`: ") for part in exercises.split("; "))
        found.append(([f"{s.strip('`')}.{n}" for s, _, names in of_stage for n in names.split(", ")], float(hours)))
    return found


@pytest.mark.parametrize(("count", "profile", "table"), SYLLABI, ids=[s[1] for s in SYLLABI])
def test_syllabus_covers_profile_with_right_hours_and_order(count, profile, table):
    assert [s[1] for s in SYLLABI] == ["short", "core", "full"]
    known, planned = default(), weeks(table)
    assert len(planned) == WEEKS[count]
    for ids, hours in planned:
        assert sum(known.exercise(id).hours for id in ids) == hours, f"the week of {ids[0]}"
    everything = [id for ids, _ in planned for id in ids]
    assert len(everything) == len(set(everything)), "an exercise is in two weeks"
    assert set(everything) == set(known.profiles[profile])
    for week, (ids, _) in enumerate(planned):  # a plan must not rely on stand-ins, which are for students who are stuck
        later = {id for others, _ in planned[week + 1 :] for id in others}
        assert not [id for id in ids if later.intersection(known.exercise(id).needs)], f"week {week + 1}: too early"
