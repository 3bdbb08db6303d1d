"""CONTRIBUTING.md, followed to the letter on a copy, adds an exercise that is judged as all others are.

What must be true: with the page's own files the stub fails, the reference passes, the mutant dies, the variant lives.
How it would be faked: a page that shows other figures than the commands print; a mutant that the test does not see.
"""

import pytest

from lab.course.assignment import ROOT
from tests.docs import pages

PAGE = ROOT / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    copy = pages.copied(tmp_path_factory.mktemp("contributing"))
    for step in pages.steps(PAGE):
        if isinstance(step, pages.File):
            pages.write(copy, step)
    return copy


COMMANDS = [s for s in pages.steps(PAGE) if isinstance(s, pages.Command)]


def test_its_commands_print_what_it_says(kit):
    for command in COMMANDS:
        assert not (wrong := pages.run(kit, command)), wrong
    assert "NotImplementedError" in (kit / "student/benchmarking/mean_rate.py").read_text(encoding="utf-8")


def test_what_it_adds_has_the_kit_s_form(kit):
    new = " ".join(s.path for s in pages.steps(PAGE) if isinstance(s, pages.File) and s.path.endswith(".py"))
    lint = pages.Command(f"ruff check {new} && ruff format --check {new}", "", "", 0)
    assert not (wrong := pages.run(kit, lint)), wrong
