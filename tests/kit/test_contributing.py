"""CONTRIBUTING.md, followed to the letter on a copy, adds an exercise that is judged as all others are.

What must be true: with the page's own files the stub fails, the reference passes, the mutant dies, the variant lives.
How it would be faked: a page that shows other figures than the commands print; a mutant that the test does not see.
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
