"""Lists that are cut, and what a test gave, as messages have them."""

from __future__ import annotations

import pytest

from lab.course.listing import inputs, some


@pytest.mark.parametrize(
    ("names", "told"),
    [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "b", "c", "d", "e"], "a, b, c and 2 more")],
)
def test_names_in_a_line_are_cut_where_there_are_many(names, told):
    assert some(names) == told


def test_what_was_given_ends_a_message_in_a_line_of_its_own_and_can_be_read_back():
    """As Python has it, with six digits of what is no whole number; whole numbers keep theirs."""
    case = {"bytes": 781468467, "options": {"backward_s": 0.0032831605701630576, "sizes": [1.0, 2]}, "overlap": True}
    head, line = f"expected 1, got 2{inputs(case)}".split("\n")
    assert head == "expected 1, got 2"
    assert line.startswith("given ")
    rounded = {"bytes": 781468467, "options": {"backward_s": 0.00328316, "sizes": [1.0, 2]}, "overlap": True}
    assert eval(line.removeprefix("given ")) == rounded
