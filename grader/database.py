"""A SQLite file that loses nothing: one writer, whole transactions, formats that are upgraded in place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import postgres
from .errors import Busy, GradebookError

APPLICATION = 0x53484152  # PRAGMA application_id, "SHAR": tells a gradebook from any other SQLite file


class Database:
    """Opens or creates the file, and brings an older format up to date.

    schema: the tables of format `newest`; upgrades: by format, the statements that make the next one of it.
    With `write` (the default) this process is the only grader on it: a second one is refused. `write=False`
    reads an existing one, also while another process grades into it. Use it from the thread that opened it.
    Where gradebook.address stands beside it, the gradebook is in the PostgreSQL database that this file names.
    """

    _db: sqlite3.Connection | postgres.Connection

    def __init__(self, path: str | Path, schema: str, newest: int, upgrades: Mapping[int, str], *, write: bool = True):
        self.path = Path(path)
        self._schema, self._newest, self._upgrades = schema, newest, upgrades
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise GradebookError(f"{self.path}: expected a file in an existing folder; make the folder or name a file")
        self._lock: int | None = None
        if (beside := self.path.with_suffix(".address")).is_file():
            address = beside.read_text(encoding="utf-8").strip()
            self._db = postgres.Connection(address, schema, newest, write=write)
            return
        if not write and not self.path.exists():
            raise GradebookError(f"{self.path}: no gradebook here yet; `grader grade` makes one")
        self._lock = _lock(self.path) if write else None
        try:
            with self._errors():
                self._db = sqlite3.connect(self.path, timeout=10, isolation_level=None)
            self._check(write)
        except GradebookError:
            self.close()
            raise

    def close(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            os.close(self._lock)  # which unlocks; the lock file stays, for removing it would race with the next grader
            self._lock = None

    def _check(self, write: bool) -> None:
        """Refuse what is not a gradebook of a known format, before anything is written to it; upgrade an older one."""
        asked = ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
        version, application, tables = (self._ask(sql)[0][0] for sql in asked)
        new = (version, application, tables) == (0, 0, 0)
        if not new and application != APPLICATION:
            raise GradebookError(f"{self.path}: not a gradebook but another SQLite file; give another path")
        if not new and version != self._newest and version not in self._upgrades:
            raise GradebookError(
                f"{self.path}: gradebook of format {version}, this grader reads format {self._newest}; "
                f"{'use a newer grader' if version > self._newest else 'grade into a new file'}"
            )
        if new and not write:
            raise GradebookError(f"{self.path}: an empty file; `grader grade` makes a gradebook")
        if not new and version != self._newest and not write:  # by one that has the lock as long as it takes
            Database(self.path, self._schema, self._newest, self._upgrades).close()
        settings = "journal_mode = WAL, synchronous = FULL, foreign_keys = ON" if write else "query_only = ON"
        for setting in settings.split(", "):
            self._ask(f"PRAGMA {setting}")
        if not write:
            return
        if new:
            self._make([self._schema, f"PRAGMA application_id = {APPLICATION};"])
        elif version != self._newest:
            self._make([self._upgrades[v] for v in range(version, self._newest)])

    def _make(self, scripts: list[str]) -> None:
        """Run them and raise the format, whole or not at all."""
        with self._transaction():
            for statement in _statements("".join(scripts) + f"PRAGMA user_version = {self._newest};"):
                self._ask(statement)

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE", of: str = "decided") -> Iterator[None]:
        """of: what one that writes changes, "results" or "decided"; readers see by its count when to look again."""
        self._ask(f"BEGIN {kind}")
        try:
            yield
            if kind == "IMMEDIATE":
                self._ask(f"UPDATE change SET {of} = {of} + 1")
            self._ask("COMMIT")
        except BaseException:  # Ctrl-C too: nothing half-written stays
            if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                self._ask("ROLLBACK")
            raise

    def _insert(self, table: str, row: tuple[Any, ...]) -> Any:
        """Add a row; its first cell, which is the number where that was None."""
        return self._ask(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))}) RETURNING *", row)[0][0]

    def _ask(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a statement; its rows. Raises GradebookError."""
        with self._errors():
            cursor = self._db.execute(sql, values)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            says = str(error)
            if "not a database" in says:
                says = "not a gradebook, nor any SQLite file; give another path"
            elif "locked" in says:
                says = "in use by another program; close it and run again"
            elif "readonly" in says or "unable to open" in says:
                says = "cannot be opened or written here; check its permissions or give another path"
            raise GradebookError(f"{self.path}: {says}") from None


def exact(name: str) -> str | bytes:
    """A file's name, kept exactly, for --resume looks it up: as bytes where it is not Unicode."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogatepass")
    return name


def text(stored: str | bytes) -> str:
    return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else stored


def texts(row: Iterable[Any]) -> list[Any]:
    return [text(cell) if isinstance(cell, bytes) else cell for cell in row]


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, triggers whole, so that all of them run in one transaction."""
    statement = ""
    for piece in script.split(";")[:-1]:
        statement += f"{piece};"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _lock(path: Path) -> int:
    """Take the lock file beside the gradebook, which names its holder; held until closed, also by kill -9."""
    beside = path.with_name(path.name + ".lock")
    try:
        handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise GradebookError(f"{beside}: cannot be made: {error.strerror}; give another path") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise Busy(f"{path}: another grader (process {holder}) is using it; try again when it has ended") from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle
