"""The gradebook loses and confuses no results. If it cannot be used, it raises an error in one line."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.database import APPLICATION, FORMAT
from grader.gradebook import Flag, Gradebook, GradebookError, Graded

from .classroom import A_RUN, RUN, raises_one_line, result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gradebook.sqlite"


def test_gradebook_returns_records_as_written(path: Path) -> None:
    failed = result(outcome="failed", test="b", message="off by one", seconds=0.25, output="hi", public="passed",
                    instrumented=True)  # fmt: skip
    graded = Graded(
        "ada", "submissions/ada.zip", "a" * 64, "graded", "", 12.5, ["left out: .git/"], [result(), failed],
        [Flag("forged results", "wrote results.json")],
    )  # fmt: skip
    refused = Graded("odd\udc80\0name", "submissions/bob.zip", "b" * 64, "refused", "not an archive")
    with Gradebook(path) as book:
        run = book.start_run(**RUN, versions={"torch": "2.13.0"}, commit="c0ffee")
        book.record(run, refused)
        book.record(run, graded)
    with Gradebook(path, write=False) as book:
        assert list(book.graded(run).items()) == [("ada", graded), (refused.name, refused)]
        latest = book.latest_run()
    assert latest == replace(A_RUN, id=run, started=latest.started)


def test_record_replaces_earlier_one_of_same_run_only(path: Path) -> None:
    with Gradebook(path) as book:
        assert book.latest_run() is None
        first, second = book.start_run(**RUN), book.start_run(**RUN)
        book.record(first, Graded("ada", results=[result()], flags=[Flag("x", "y")]))
        book.record(second, Graded("ada", results=[result(), result(test="b")]))
        book.record(second, Graded("ada", results=[result(outcome="failed", test="c")]))
        assert [r.test[-6:] for r in book.graded(second)["ada"].results] == ["test_c"]
        assert [len(book.graded(first)["ada"].results), len(book.graded(first)["ada"].flags)] == [1, 1]
        assert [r.id for r in book.runs()] == [first, second]
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM submission").fetchone() == (2,), "the replaced one is still there"


HOSTILE = st.text(st.characters(), max_size=60) | st.sampled_from(
    ["\ud800", "a\x00b", "'; DROP TABLE result; --", "\x1b[2J", "\u202egnp.exe", '{"a": ', "x" * 3_000_000]
)


@settings(max_examples=30, deadline=None)
@given(names=st.lists(HOSTILE, min_size=1, max_size=4, unique=True), text=HOSTILE)
def test_gradebook_keeps_hostile_names_and_cleans_hostile_text(
    tmp_path_factory: pytest.TempPathFactory, names: list, text: str
) -> None:
    path = tmp_path_factory.mktemp("book") / "gradebook.sqlite"
    with Gradebook(path) as book:
        run = book.start_run(**RUN)
        for name in names:
            row = result(outcome="failed", message=text, output=text, reason=text, seconds=float("nan"))
            flags = [Flag(text, text)]
            book.record(run, Graded(name, text, "h", "graded", text, float("inf"), [text], [row], flags))
        stored = book.graded(run)
        assert set(stored) == set(names), "names must come back exactly, or --resume grades twice"
        for graded in stored.values():
            assert graded.source == text
            texts = [graded.message, *graded.notes, graded.results[0].message, graded.results[0].output]
            assert all(len(s) <= 20_000 for s in texts)
            assert not any(c in s for s in texts for c in ("\x00", "\x1b", "\u202e"))
            json.dumps(texts, ensure_ascii=False).encode("utf-8")


def test_an_exception_in_record_leaves_nothing_behind(path: Path) -> None:
    with Gradebook(path) as book:
        run = book.start_run(**RUN)
        book.record(run, before := Graded("ada", message="as it was"))
        with pytest.raises(TypeError, match="vars"):
            book.record(run, Graded("ada", status=object()))
        with pytest.raises(GradebookError, match="no run 99"):
            book.record(99, Graded("ada"))
        book.record(run, Graded("bob"))
        assert book.graded(run) == {"ada": before, "bob": Graded("bob")}


def test_gradebook_uses_wal_and_full_sync(path: Path) -> None:
    with Gradebook(path) as book:
        assert [book._db.ask(f"PRAGMA {p}") for p in ("journal_mode", "synchronous")] == [[("wal",)], [(2,)]]


def test_a_second_grader_is_refused_and_a_reader_is_not(path: Path) -> None:
    with Gradebook(path) as book:
        run = book.start_run(**RUN)
        with pytest.raises(GradebookError, match=rf"another grader (\(process {os.getpid()}\) )?is using"):
            Gradebook(path)
        with Gradebook(path, write=False) as reader:
            assert reader.graded(run) == {}
            with pytest.raises(GradebookError, match=r"cannot be opened or written|read-only"):
                reader.record(run, Graded("ada"))
    Gradebook(path).close()


def _sqlite(*statements: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db:
            for statement in statements:
                db.execute(statement)

    return make


OWN_ID = f"PRAGMA application_id = {APPLICATION}"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("name,points\nada,35\n" * 100), "not a gradebook"),
        (_sqlite("CREATE TABLE songs (title)"), "another SQLite file"),
        (_sqlite(OWN_ID, f"PRAGMA user_version = {FORMAT + 1}"), f"reads format {FORMAT}; use a newer grader"),
        (_sqlite(OWN_ID, f"PRAGMA user_version = {FORMAT - 1}"), f"reads format {FORMAT}; grade into a new folder"),
        (lambda path: path.mkdir(), "expected a file"),
    ],
)
def test_invalid_gradebook_is_refused_in_one_line_and_unchanged(path: Path, make, says: str) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    for write in (True, False):
        with raises_one_line(GradebookError, says, str(path)):
            Gradebook(path, write=write)
    assert before == (path.read_bytes() if path.is_file() else b"")


def test_missing_gradebook_error_suggests_a_remedy(path: Path) -> None:
    with pytest.raises(GradebookError, match="grader grade"):
        Gradebook(path, write=False)
    assert not path.exists()
    with pytest.raises(GradebookError, match="existing folder"):
        Gradebook(path.parent / "nowhere" / "gradebook.sqlite")
