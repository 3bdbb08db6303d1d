"""Every term has its words, and a link that leads somewhere."""

from __future__ import annotations

import re

import pytest

from handout.make_glossary import PAGE, is_call, page, terms
from lab.course.assignment import ROOT, default

from .test_handout import anchors

HANDOUT = ROOT / "handout"


def test_the_page_is_what_terms_tsv_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m handout.make_glossary"


def test_no_term_is_there_twice():
    names = [t.term.casefold() for t in terms()]
    assert len(set(names)) == len(names) >= 139


@pytest.mark.parametrize("term", terms(), ids=lambda t: t.term)
def test_a_link_leads_to_what_its_depth_promises(term):
    sentences = re.findall(r"[.!?:](?= |$)", term.text)
    assert sentences, f"{term.term} has no sentence"
    if term.depth == "cluster":
        assert term.link in anchors(HANDOUT / "cluster.md"), f"cluster.md has no section {term.link}"
    elif term.depth == "told":
        assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", term.link)
        assert len(sentences) >= 2, "told in two sentences and a reference"
    elif term.link.endswith(".py"):
        assert (ROOT / term.link).is_file()
    elif not is_call(term.link):
        stage, name = default().exercises[term.link].id.split(".")
        assert f"exercise-{stage}{name}" in anchors(HANDOUT / f"{stage}.md")
