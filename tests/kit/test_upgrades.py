"""A gradebook of an older format is upgraded in place, and nothing is lost."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from grader.gradebook import FORMAT, Gradebook, GradebookError
from lab.course.assignment import default

A = default()
IDS = A.profiles["tour"]  # 10, 15 and 10 points
FORMAT_1 = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY, seed TEXT NOT NULL, profile TEXT NOT NULL, isolation TEXT NOT NULL,
    assignment TEXT NOT NULL, started TEXT NOT NULL, versions TEXT NOT NULL, "commit" TEXT NOT NULL);
CREATE TABLE submission (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, name NOT NULL, source NOT NULL,
    hash TEXT NOT NULL, status TEXT NOT NULL CHECK (status IN ('graded', 'refused')), message TEXT NOT NULL,
    seconds REAL NOT NULL, notes TEXT NOT NULL, earned REAL NOT NULL, possible REAL NOT NULL,
    not_run REAL NOT NULL, UNIQUE (run, name));
CREATE TABLE result (
    submission INTEGER NOT NULL REFERENCES submission ON DELETE CASCADE, exercise TEXT NOT NULL, kind TEXT NOT NULL,
    test TEXT NOT NULL, "case" TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL,
    seconds REAL NOT NULL, output TEXT NOT NULL, public TEXT NOT NULL, instrumented INTEGER NOT NULL);
CREATE TABLE flag (
    submission INTEGER NOT NULL REFERENCES submission ON DELETE CASCADE, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX result_submission ON result (submission);
CREATE INDEX flag_submission ON flag (submission);
PRAGMA application_id = 0x53484152;
PRAGMA user_version = 1;
INSERT INTO run VALUES (1, 'abcd', 'tour', 'process', 'f', '2026-01-31 23:59:59', '{}', '');
INSERT INTO submission VALUES (1, 1, 'ada', 'ada.zip', 'h', 'graded', '', 2.5, '["a note"]', 10, 10, 25);
INSERT INTO result VALUES (1, 'ddp.naive', 'numerics', 't::test_a', '', 'passed', '', '', 0.5, '', '', 0);
INSERT INTO flag VALUES (1, 'odd', 'evidence');
"""


def older(path: Path) -> Path:
    db = sqlite3.connect(path)
    db.executescript(FORMAT_1)
    db.close()
    return path


@pytest.mark.parametrize("write", [True, False])
def test_a_book_of_format_1_is_upgraded_in_place_and_loses_nothing(tmp_path: Path, write: bool) -> None:
    path = older(tmp_path / "book.sqlite")
    with Gradebook(path, write=write) as book:
        ada = book.graded(1)["ada"]
        run = book.latest_run()
    assert run is not None
    assert (run.seed, run.manifest) == ("abcd", {})
    assert (ada.seconds, ada.notes, [r.outcome for r in ada.results], ada.flags[0].detail) == (
        2.5, ["a note"], ["passed"], "evidence",
    )  # fmt: skip
    assert ada.grade(A, IDS).final == 10
    with Gradebook(path) as book:
        book.decide("adjust", "ada", "", 1, "kind", "tess")
        assert book.graded(1)["ada"].grade(A, IDS).final == 11


def form(path: Path) -> tuple:
    """Tables with their columns, indices and triggers, and the format."""
    db = sqlite3.connect(path)
    names = sorted(db.execute("SELECT type, name FROM sqlite_master").fetchall())
    columns = {n: db.execute(f"PRAGMA table_info({n})").fetchall() for kind, n in names if kind == "table"}
    version = db.execute("PRAGMA user_version").fetchone()[0]
    db.close()
    return names, columns, version


def test_an_upgraded_book_has_the_form_of_a_new_one(tmp_path: Path) -> None:
    Gradebook(older(tmp_path / "old.sqlite")).close()
    Gradebook(tmp_path / "new.sqlite").close()
    assert form(tmp_path / "old.sqlite") == form(tmp_path / "new.sqlite")
    assert form(tmp_path / "new.sqlite")[2] == FORMAT


def test_an_upgrade_that_fails_leaves_the_older_book_as_it_was(tmp_path: Path) -> None:
    path = older(tmp_path / "book.sqlite")
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE decision (in_the_way)")
    db.close()
    before = form(path)
    with pytest.raises(GradebookError, match="decision already exists"):
        Gradebook(path)
    assert form(path) == before
