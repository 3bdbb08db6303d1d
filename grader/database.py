"""Stores the gradebook's two tables: one writer, atomic transactions. SQLite here, PostgreSQL in `postgres`."""

import contextlib
import fcntl
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import Busy, GradebookError

FORMAT = 4
APPLICATION = 0x53484152  # PRAGMA application_id, "SHAR": distinguishes a gradebook from other SQLite files
Values = tuple[Any, ...]
# Valid in both databases. Texts are JSON in ASCII, so that no name chosen by a student can make a database refuse it.
TABLES = (
    "CREATE TABLE submission (number INTEGER PRIMARY KEY, run INTEGER NOT NULL, name TEXT NOT NULL,"
    " graded TEXT NOT NULL, UNIQUE (run, name))",
    "CREATE TABLE entry (kind TEXT NOT NULL, number INTEGER NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, number))",
)
STAYS = "entries are never changed or removed"


class Database(ABC):
    """A connection for the thread that opened it. A connection that writes locks out other writers until it closes."""

    where: str  # name of the database in errors
    setup: tuple[str, ...]  # further statements that create a new database, besides TABLES
    begin_read = "BEGIN"  # begins a consistent read, also while another process writes

    @abstractmethod
    def ask(self, sql: str, values: Values = ()) -> list[Values]:
        """Run a statement and return its rows. Raises GradebookError."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def in_transaction(self) -> bool: ...

    @contextlib.contextmanager
    def transaction(self, begin: str = "BEGIN") -> Iterator[None]:
        self.ask(begin)
        try:
            yield
            self.ask("COMMIT")
        except BaseException:  # Ctrl-C too: nothing half-written stays
            if self.in_transaction:  # SQLite itself rolls back when the disk is full
                self.ask("ROLLBACK")
            raise

    def check(self, version: int | None, write: bool) -> None:
        """Raise GradebookError if the format is not FORMAT, or if a new database (None) is opened for reading."""
        if version is None and not write:
            raise GradebookError(f"{self.where}: no gradebook here yet; `grader grade` makes one")
        if version not in (None, FORMAT):
            advice = "use a newer grader" if version and version > FORMAT else "grade into a new folder"
            raise GradebookError(
                f"{self.where}: gradebook of format {version}, this grader reads format {FORMAT}; {advice}"
            )

    def create(self) -> None:
        with self.transaction():
            for statement in (*TABLES, *self.setup):
                self.ask(statement)


class Sqlite(Database):
    setup = (
        f"CREATE TRIGGER entry_stays BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT, '{STAYS}'); END",
        f"CREATE TRIGGER entry_kept BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT, '{STAYS}'); END",
        f"PRAGMA application_id = {APPLICATION}",
        f"PRAGMA user_version = {FORMAT}",
    )

    def __init__(self, path: Path, write: bool):
        self.where = str(path)
        if path.is_dir() or not path.parent.is_dir():
            raise GradebookError(f"{path}: expected a file in an existing folder; make the folder or name a file")
        if not write and not path.exists():
            self.check(None, write)
        self._lock = _lock(path) if write else None
        try:
            with self._errors():
                self._db = sqlite3.connect(path, timeout=10, isolation_level=None)
            self._open(write)
        except GradebookError:
            self.close()
            raise

    def _open(self, write: bool) -> None:
        queries = ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
        version, application, tables = (self.ask(sql)[0][0] for sql in queries)
        new = (version, application, tables) == (0, 0, 0)
        if not new and application != APPLICATION:
            raise GradebookError(f"{self.where}: not a gradebook but another SQLite file; give another path")
        self.check(None if new else version, write)
        for setting in ("journal_mode = WAL", "synchronous = FULL") if write else ("query_only = ON",):
            self.ask(f"PRAGMA {setting}")
        if new:
            self.create()

    def ask(self, sql: str, values: Values = ()) -> list[Values]:
        with self._errors():
            return self._db.execute(sql, values).fetchall()

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            os.close(self._lock)  # unlocks; the file stays, because removing it would race with the next grader
            self._lock = None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            message = str(error)
            if "not a database" in message:
                message = "not a gradebook, nor any SQLite file; give another path"
            elif "locked" in message:
                message = "in use by another program; close it and run again"
            elif "readonly" in message or "unable to open" in message:
                message = "cannot be opened or written here; check its permissions or give another path"
            raise GradebookError(f"{self.where}: {message}") from None


def _lock(path: Path) -> int:
    """Lock the file beside the gradebook and write our pid into it. The kernel unlocks it when this process ends."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        handle = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise GradebookError(f"{lock_path}: cannot be made: {error.strerror}; give another path") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise Busy(f"{path}: another grader (process {holder}) is using it; try again when it has ended") from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle
