"""Every command of README, CONTRIBUTING and the chapters runs, and prints the output that the text shows.

The tests run fenced commands in page order in a copy of the tree (pages.py explains the marks). `make` runs dry, since
CI, `make test-docs` and people run its targets. For commands inside sentences, and for commands that need something
special, the tests check only that program, options and files exist.
"""

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader.cli import app as grader_app
from handout.make_glossary import is_call, terms
from lab.commands.cli import app as lab_app
from lab.course.assignment import ROOT, default

from . import pages

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "handout").glob("*.md"))]
BLOCKS = [(page, step) for page in PAGES for step in pages.steps(page) if isinstance(step, pages.Command)]
FOLLOWED = [p for p in PAGES if pages.steps(p) and p.stem != "CONTRIBUTING"]  # tests/kit/test_contributing.py runs that
WITH_NEEDS = [(page, c) for page, c in BLOCKS if c.needs]
KIT_COMMAND = re.compile(
    r"(?:lab|grader|pytest|make|torchrun|python -m (?:lab|grader|benchmarks|examples|notebooks|pytest)\S*)(?: |$)"
)


def named_commands(pages_: list[Path] = PAGES) -> Iterator[tuple[Path, str]]:
    """Yield (page, command) for the kit's commands inside sentences."""
    for page in pages_:
        prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
        for text in re.findall(r"`([^`]+)`", prose):
            text = " ".join(text.split())
            if KIT_COMMAND.match(text) and not text.endswith(("lab.train`", ".py")):
                yield page, text


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda p: p.name)
def test_page_commands_print_the_documented_output(page, tmp_path):
    kit = pages.copy_kit(tmp_path)
    wrong = []
    for step in pages.steps(page):
        if isinstance(step, pages.File):
            pages.write(kit, step)
        elif not step.needs:
            dry_run = pages.Command(re.sub(r"^make\b", "make -n", step.text), step.prints, "", step.line)
            wrong += filter(None, [pages.run(kit, dry_run)])
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_command_blocks_are_marked_sh_or_console(page):
    for line, mark, first in pages.mark_of_each_block(page):
        if KIT_COMMAND.match(first.removeprefix("$ ")) or first.startswith("$ "):
            assert mark.split()[:1] in (["sh"], ["console"]), f"{page.name}:{line}: mark this block sh or console"


@pytest.mark.parametrize(("page", "command"), WITH_NEEDS, ids=lambda v: getattr(v, "name", getattr(v, "text", "")[:50]))
def test_commands_with_requirements_use_existing_options(page, command):
    for part in re.split(r"&&|;", command.text):
        check(page, part.strip())


NAMED = list(dict.fromkeys(named_commands()))


@pytest.mark.parametrize(("page", "text"), NAMED, ids=[f"{p.name}: {t}" for p, t in NAMED])
def test_commands_named_in_prose_exist(page, text):
    check(page, text)


_COMMANDS = {"lab": lab_app, "grader": grader_app}


def check(page: Path, text: str) -> None:
    """Assert that a command's program, subcommand, options, files and exercises exist."""
    words = [w for w in shlex.split(text.replace("…", "")) if "=" not in w or w.startswith("-") or "," in w]
    module = words[words.index("-m") + 1] if "-m" in words else ""
    program, rest = (module, words[words.index("-m") + 2 :]) if module else (words[0], words[1:])
    if program in _COMMANDS:
        done = CliRunner().invoke(_COMMANDS[program], [*rest, "--help"])  # parses all words before --help
        assert done.exit_code == 0, f"{page.name}: {text}: {done.output}"
    elif program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{page.name}: {text}: {done.stderr}"
    elif program == "pytest":
        for option in (w.partition("=")[0] for w in rest if w.startswith("-") and len(w) > 2):
            assert option in options_of_pytest(), f"{page.name}: {text}: pytest has no {option}"
        for flag, known in (("--stage", [s.name for s in default().stages]), ("--exercise", default().exercises)):
            assert all(rest[i + 1] in known for i, w in enumerate(rest[:-1]) if w == flag), f"{page.name}: {text}"
    elif module:
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{page.name}: {text}: no module {module}"
        assert spec.origin is not None, f"{page.name}: {text}: {module} is a folder"
        if spec.origin.startswith(str(ROOT)):
            files = Path(spec.origin).parent.glob("*.py") if spec.submodule_search_locations else [Path(spec.origin)]
            source = "".join(file.read_text(encoding="utf-8") for file in files)
            missing = [w for w in rest if w.startswith("--") and f'"{w}"' not in source]
            assert not missing, f"{page.name}: {text}: {module} has no {missing}"
    for word in rest:
        if re.fullmatch(r"(?:examples|handout|tests|lab|student|reference|notebooks|benchmarks)/\S*", word):
            assert (ROOT / word).exists(), f"{page.name}: {text}: {word} is not there"


@functools.cache
def options_of_pytest() -> set[str]:
    output = subprocess.run([sys.executable, "-m", "pytest", "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    return set(re.findall(r"--?[a-z][\w-]*", output))


LINKED = {t.link for t in terms() if t.depth == "runs" and not is_call(t.link)} - default().exercises.keys()


@pytest.mark.parametrize("script", sorted(LINKED))
def test_scripts_linked_from_glossary_succeed(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wrong:" not in done.stdout
    assert "ranks [0, 1]" in done.stdout
