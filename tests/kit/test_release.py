"""A student's archive works by itself, and contains no solution in any notation."""

import ast
import html
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile

import pytest
import yaml

from grader import release
from grader.errors import InputError
from lab.course.assignment import ROOT, default

PRIVATE = {"grader", "reference", "benchmarks", "examples"}
FLAT = "ddp/flat.py"


@pytest.fixture(scope="module")
def files():
    return release.files()


@pytest.fixture(scope="module")
def solutions():
    return release.solutions()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory, files):
    """The unpacked archive."""
    folder = tmp_path_factory.mktemp("student")
    release.write_zip(folder / "a.zip", {f"{release.NAME}/{name}": data for name, data in files.items()})
    with zipfile.ZipFile(folder / "a.zip") as packed:
        packed.extractall(folder)
    return folder / release.NAME


def run(folder, *command):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable if command[0] == "python" else command[0], *command[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def check_run(folder, code, *command, words=()):
    """Assert that the command ends with this code and prints these words. Return its output."""
    returncode, text = run(folder, *command)
    assert returncode == code, text
    assert all(word in " ".join(text.split()) for word in words), text
    return text


def test_no_solution_is_in_a_release(files, solutions):
    """Except for code that is given on purpose, all of which must be there."""
    assert {(leak.file, leak.text) for leak in solutions.search(files)} == release.GIVEN


def test_release_contains_only_student_files(files):
    folders = {name.partition("/")[0] for name in files}
    assert folders.isdisjoint(PRIVATE - {"examples"} | {".ci", "CHANGELOG.md"})
    assert {name.split("/")[1] for name in files if name.startswith("examples/")} == {"cluster"}
    private = ("tests/kit/", "tests/docs/", "tests/cs336/")
    assert not [n for n in files if n.startswith(private) or "instructors" in n or "__pycache__" in n]
    for exercise in default().exercises.values():
        assert f"student/{exercise.file}" in files


def test_release_does_not_import_private_packages(files):
    for name, data in files.items():
        if name.endswith(".py"):
            nodes = [n for n in ast.walk(ast.parse(data)) if isinstance(n, ast.Import | ast.ImportFrom)]
            modules = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
            modules += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
            strangers = {m for m in modules if m.partition(".")[0] in PRIVATE or m.startswith("tests.kit")}
            assert not strangers, f"{name} imports {strangers}"


def test_links_in_release_pages_resolve(unpacked):
    for page in unpacked.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if not target.startswith(("http", "#")):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target} is not there"


def test_release_readme_commands_work(unpacked):
    readme = (unpacked / "README.md").read_text(encoding="utf-8")
    points = sum(default().exercise(id).points for id in default().profiles["core"])
    first = next(iter(default().exercises.values()))
    for command, code, *words in (
        ("lab", 0, f"0 of {points:g} points", f"next: {first.id}"),
        ("lab hint --level 2", 0, first.hints[1]),
        ("pytest tests/ --stage ddp", 1, "next: ddp."),
        ("make env", 0),
        ("make handout", 0),
    ):
        assert command in readme
        tried = re.sub("^(lab|pytest)", r"python -m \1", command.replace("make", "make -n"))
        tried = tried.replace("--stage ddp", "--stage ddp --exercise ddp.naive")  # one exercise of the stage is enough
        check_run(unpacked, code, *tried.split(), words=words)
    assert "lab check" in readme
    _, text = run(unpacked, "make", "-n", "env", "test", "handout")
    assert all((unpacked / name).is_file() for name in re.findall(r"cp (\S+) ", text))
    _, text = run(unpacked, "python", "-c", "import lab; print(lab.__file__)")
    assert str(unpacked) in text, "another kit's lab was tried"


def test_github_classroom_workflow_works_in_a_release(unpacked):
    """Runs the workflow's last step. The other steps are those of the README."""
    text = (ROOT / "examples" / "classroom" / ".github" / "workflows" / "classroom.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    install, test, points = (step["run"] for step in job["steps"] if "run" in step)
    check_run(unpacked, 0, *install.replace("make", "make -n").split())
    assert test == ".venv/bin/python -m pytest tests/"
    (unpacked / ".venv" / "bin").mkdir(parents=True)
    (unpacked / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (unpacked / ".venv" / "bin" / "python").chmod(0o755)
    check_run(unpacked, 0, "env", f"GITHUB_STEP_SUMMARY={unpacked / 'summary.md'}", "bash", "-ec", points)
    assert "next: " in (unpacked / "summary.md").read_text(encoding="utf-8")
    for name in re.findall(r"cache-dependency-path: (\S+)", text):
        assert (unpacked / name).is_file()


def test_the_notebooks_need_no_implementation(files):
    names = [n for n in files if n.endswith(".ipynb")]
    assert len(names) == 7
    for name in names:
        cells = json.loads(files[name])["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        assert not re.search(r"\b(reference|student|tests|grader)\b", code), name


def body(file: str = FLAT, statements: int = 3) -> str:
    """Some consecutive statements of a reference solution."""
    tree = ast.parse(text := (ROOT / "reference" / file).read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and len(n.body) > statements]
    longest = max(functions, key=lambda f: len(ast.unparse(f)))
    lines = text.splitlines()[longest.body[-statements].lineno - 1 : longest.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"


def reformatted(code: str) -> str:
    """Reformat with two spaces, single quotes, one argument per line, and comments."""
    code = textwrap.indent(ast.unparse(ast.parse(code)).replace("    ", "  "), "      ")
    return re.sub(r"(?m)$", "  # a remark", re.sub(r"\(([^()]+), ", r"(\n\1,\n  ", code))


def in_notebook(code: str, **layout: int) -> str:
    cells = [{"cell_type": "code", "source": code.splitlines(keepends=True), "outputs": []}]
    return json.dumps({"cells": cells, "nbformat": 4}, **layout)


def in_output(code: str) -> str:
    """Code as in HTML output of a notebook: escaped for HTML, then for JSON."""
    return json.dumps({"outputs": [{"data": {"text/html": in_html(code)}}]})


def in_html(code: str) -> str:
    """Code as on a website: each word in a span, signs escaped, lines separated by <br>."""
    spans = re.sub(r"\w+", r'<span class="n">\g<0></span>', html.escape(code, quote=True).replace("&#x27;", "&apos;"))
    spans = re.sub(r"&<span class=\"n\">(\w+)</span>;", r"&\1;", spans)
    return f'<p>See:</p><pre class="highlight"><code>{spans.replace(chr(10), "<br>")}</code></pre>'


@pytest.mark.parametrize(
    "write", [str, reformatted, lambda c: in_notebook(c, indent=1), in_notebook, in_output, in_html],
    ids=["as it is", "reformatted", "notebook", "notebook in one line", "output of a notebook", "html"],
)  # fmt: skip
def test_a_planted_solution_is_found(solutions, write):
    text = "before\n" + write(body()) + "\nafter, and\n"
    found = list(solutions.find(text))
    assert found, text
    assert {leak.source for leak in found} == {FLAT}
    short = body().splitlines()[-1] + "\n"
    assert not list(solutions.find("before\n" + write(short))), "one short statement is no leak"


def test_release_stops_when_a_file_contains_a_solution(files, monkeypatch, tmp_path):
    planted = {"lab/harness/rng.py": files["lab/harness/rng.py"] + b"\n\n'''\n" + body().encode() + b"'''\n"}
    monkeypatch.setattr(release, "files", lambda *_: planted)
    with pytest.raises(InputError, match=r"lab/harness/rng.py holds ddp/flat.py:\d+"):
        release.archive(tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())


def test_leak_search_finds_every_solution_longer_than_a_line(solutions):
    """Searches the reference itself. Solutions that are not found are a single short statement."""
    missed = []
    for e in default().exercises.values():
        text = (ROOT / "reference" / e.file).read_text(encoding="utf-8")
        if not any(leak.source == e.file for leak in solutions.find(text)):
            missed.append(e.id)
    assert missed == ["flash_attention.speed"]
