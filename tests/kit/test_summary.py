"""What stands at the end of a student's `pytest tests/`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from lab import summary
from lab.assignment import default
from lab.pytest_plugin import VERDICTS
from lab.scoring import Result, score

FIRST = "ddp.naive"


def said(id: str, outcome: str = "passed", **more) -> Result:
    return Result(id, "numerics", f"tests/x/test_x.py::test_{id.partition('.')[2]}", "", outcome, **more)


def written() -> tuple[list[str], SimpleNamespace]:
    """Lines, and a terminal that writes to them."""
    lines: list[str] = []
    return lines, SimpleNamespace(write_line=lambda line, **colour: lines.append(line), verbosity=-1)


def test_the_summary_leaves_its_columns_to_numbers_and_says_how_to_see_the_rest():
    lines, terminal = written()
    failed = [dataclasses.replace(said(FIRST, "failed", message="off"), test=f"tests/x.py::test_{i}") for i in range(3)]
    results = [
        *failed,
        dataclasses.replace(said(FIRST), kind="property"),
        dataclasses.replace(said(FIRST), kind="timing"),
    ]
    summary._failures(terminal, failed)
    assert "  … and 2 more: pytest tests/ --exercise ddp.naive -v" in lines
    lines.clear()
    terminal.verbosity = 0
    summary._failures(terminal, failed)
    assert [line for line in lines if "test_" in line] == [f"{FIRST} · numerics · test_{i}" for i in range(3)]
    assert lines.count("  off") == 3
    assert not any("more" in line for line in lines)
    lines.clear()
    summary._table(
        terminal, score(default(), results, [FIRST]), set(), "ddp", {FIRST: list("abcde"), "ddp.flat": ["a"]}
    )
    (row,) = (i for i, line in enumerate(lines) if line.startswith(FIRST))
    assert len(lines[row].rstrip()) <= len(lines[0]), "a sentence stands below a column of numbers"
    assert lines[row + 1].strip() == "property and timing count once all numerics pass"
    assert lines[row + 2].strip() == "a stand-in for each that does not pass yet: a, b, c and 2 more"
    assert sum("stand-in" in line for line in lines) == 1
    lines.clear()
    summary._table(terminal, score(default(), [said(FIRST, "not_run")], [FIRST]), set(), "ddp", {})
    assert len(lines[1].rstrip()) == len(lines[0]), "what was not run ends where its heading does"


def test_what_was_stopped_half_run_has_no_points():
    lines, terminal = written()
    verdicts = SimpleNamespace(passes=lambda id: True, stood_in={})
    config = SimpleNamespace(stash={VERDICTS: verdicts}, option=SimpleNamespace(impl="student"))
    summary.write(terminal, [said(FIRST), said("ddp.flat")], config, {"ddp.flat": (1, 9)})
    assert "ddp.flat: stopped after 1 of 9 tests, which says nothing yet" in lines
    assert [line.partition(" ")[0] for line in lines if "✓" in line] == [FIRST]
    assert not any(line.startswith("next: ") for line in lines)


def test_what_was_printed_is_shown_without_warnings():
    output = "a\n/x/y.py:3: UserWarning: hm\nb\n" + "".join(f"{i}\n" for i in range(4))
    assert summary.printed(output) == ["… 1 line before", "b", "0", "1", "2", "3"]
    assert summary.printed("rank 1: x.py:3: UserWarning: hm\nrank 1: b\n") == ["rank 1: b"]
    assert summary.printed("") == []


def test_a_debuggers_session_tells_what_failed_and_what_it_cannot_run():
    lines, terminal = written()
    away = [dataclasses.replace(said(FIRST, "not_run"), reason="--inline runs single-rank probes")] * 2
    summary.write_inline(terminal, [said(FIRST, "failed", message="off"), *away])
    assert "  off" in lines
    assert lines[-1] == "2 not run: --inline runs single-rank probes"
