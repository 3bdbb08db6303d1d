"""CONTRIBUTING.md, followed to the letter on a copy, adds an exercise that is judged as all others are.

Must hold: with the page's files the stub fails, the reference passes, the mutant is caught, the variant passes.
Typical fakes: a page whose figures differ from the commands' output; a mutant that the test does not catch.
"""

from lab.course.assignment import ROOT
from tests.docs import pages


def test_contributing_page_files_lint_and_commands_print_as_shown(tmp_path):
    steps, kit = pages.steps(ROOT / "CONTRIBUTING.md"), pages.copy_kit(tmp_path)
    files = [step for step in steps if isinstance(step, pages.File)]
    for file in files:
        pages.write(kit, file)
    new = " ".join(file.path for file in files if file.path.endswith(".py"))
    lint = pages.Command(f"ruff check {new} && ruff format --check {new}", "", "", 0)
    for command in (lint, *(step for step in steps if isinstance(step, pages.Command))):
        assert not (wrong := pages.run(kit, command)), wrong
    assert "NotImplementedError" in (kit / "student/benchmarking/mean_rate.py").read_text(encoding="utf-8")
