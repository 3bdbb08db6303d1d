"""The site's parts that need no Sphinx: cards, links, and the code that the student's edition shows.

Typical faults: an outdated card; a renamed heading with old links; a function body of student/ or reference/ on a page;
a student's half-edited file that stops the build.
"""

import ast
import re

import pytest

from handout.site import cards, stage
from handout.site.interface import interface
from lab.course.assignment import ROOT, default

from .test_handout import prose

CHAPTERS = [ROOT / "handout" / f"{s.name}.md" for s in default().stages]
PARTS = ["Why", "The idea", "Pitfalls", "On a GPU", "Questions", "Further reading"]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.name)
def test_a_chapter_has_its_parts_in_order_and_a_picture(chapter):
    headings = re.findall(r"(?m)^## (.+)$", text := prose(chapter))
    assert [h for h in headings if h in PARTS] == PARTS
    assert re.search(r"!\[[^\]]{40,}\]\(images/\w+\.svg\)", text.partition("## The idea")[2].partition("\n## ")[0])


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.name)
def test_equation_numbers_are_sequential_and_docstring_citations_exist(chapter):
    text = chapter.read_text(encoding="utf-8")
    numbers = [int(a or b) for a, b in re.findall(r"\\tag\{(\d+)\}|\((\d+)\)\s+`", text)]
    assert numbers == [*range(1, 1 + len(numbers))]
    for e in default().of_stage(chapter.stem):
        section = text.split(f"## Exercise `{e.id}`")[1].split("\n## ")[0]
        for node in ast.walk(ast.parse((ROOT / "student" / e.file).read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for cited in re.findall(r"(?m)(?:^| of )\((\d+)\)(?= |,)", ast.get_docstring(node) or ""):
                    assert f"\\tag{{{cited}}}" in section, f"{e.file}: {node.name} cites ({cited})"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.name)
def test_exercise_headings_have_cards_matching_assignment_toml(chapter):
    text = chapter.read_text(encoding="utf-8")
    assert cards.refreshed(text) == text, "run python -m handout.site --cards"
    headed = re.findall(r"(?m)^## Exercise `(\S+)`\n```\{exercise\} (\S+)$", text)
    assert all(heading == card for heading, card in headed)
    assert sorted(id for id, _ in headed) == sorted(e.id for e in default().of_stage(chapter.stem))


def test_a_card_lists_every_test_of_its_exercise_by_kind():
    for e in default().exercises.values():
        by_kind = cards.tests_by_kind(e)
        assert by_kind, f"{e.id}: no test names it"
        assert sum(points for points, _ in by_kind.values()) == pytest.approx(e.points)
    assert cards.tests_by_kind(default().exercise("ddp.naive"))["property"][1]


def test_an_interface_keeps_what_is_provided_and_no_body():
    text = interface(
        '@provided\nclass Given:\n    x: int = 1\n\ndef _mine(): return 1\n\nSECRET = 2\n\n'
        '@wrapped(by=lambda x: x)\ndef f(\n    x: int,  # (n,)\n) -> int:  # told\n    # how\n'
        '    """What.\n\n    More.\n    """\n    return _mine() + x\n\n'
        "class C(Base):\n    y = SECRET\n    def __init__(self, a): self.a = a\n    def _own(self): return 3\n"
    )  # fmt: skip
    assert text == (
        "@provided\nclass Given:\n    x: int = 1\n\n\n"
        "@wrapped(by=lambda x: x)\ndef f(\n    x: int,  # (n,)\n) -> int:\n"
        '    """What.\n\n    More.\n    """\n\n\nclass C(Base):\n\n\n    def __init__(self, a):\n        ...\n'
    )


@pytest.mark.parametrize(
    ("held", "says"),
    [(b"def f(:\n", "line 1: not Python as it stands"), (b"\xff\xfe", "cannot be read"), (None, "cannot be read")],
)
def test_broken_or_missing_student_file_becomes_one_line_note(tmp_path, monkeypatch, held, says):
    (tmp_path / "student" / "ddp").mkdir(parents=True)
    if held is not None:
        (tmp_path / "student" / "ddp" / "naive.py").write_bytes(held)
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    text = stage.code_of("ddp/naive.py", "student")
    assert says in text
    assert "\n" not in text
    assert str(tmp_path) not in text
