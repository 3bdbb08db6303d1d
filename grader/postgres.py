"""A gradebook in PostgreSQL, with the same tables and statements as in SQLite."""

import contextlib
from typing import Any

from .database import FORMAT, STAYS, Database, Values
from .errors import Busy, GradebookError

try:
    import psycopg
except ImportError:  # an extra: pip install '.[postgres]'
    psycopg = None  # type: ignore[assignment]


class Postgres(Database):
    where = "gradebook.address"
    setup = (
        f"CREATE FUNCTION entry_stays() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{STAYS}'; END $$",
        "CREATE TRIGGER entry_stays BEFORE UPDATE OR DELETE ON entry FOR EACH ROW EXECUTE FUNCTION entry_stays()",
        "CREATE TABLE format (number INTEGER NOT NULL)",
        f"INSERT INTO format VALUES ({FORMAT})",
    )
    begin_read = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

    def __init__(self, address: str, write: bool):
        if psycopg is None:
            raise GradebookError(f"{self.where}: expected psycopg to be installed; run: pip install '.[postgres]'")
        try:
            self._db = psycopg.connect(address, autocommit=True, connect_timeout=10)
        except psycopg.Error as error:
            raise self._error(error) from None
        try:
            self._open(write)
        except GradebookError:
            self.close()
            raise

    def _open(self, write: bool) -> None:
        if self._value("SELECT current_schema()") is None:
            raise GradebookError(f"{self.where}: expected a schema that exists; run CREATE SCHEMA in the database")
        if write and not self._value("SELECT pg_try_advisory_lock(hashtext(current_schema()), 1397244242)"):
            raise Busy(f"{self.where}: another grader is using this database; try again when it has ended")
        new = self._value("SELECT to_regclass('format')") is None
        self.check(None if new else self._value("SELECT number FROM format"), write)
        if new:
            self.create()
        if not write:
            self.ask("SET default_transaction_read_only = on")

    def _value(self, sql: str) -> Any:
        return self.ask(sql)[0][0]

    def ask(self, sql: str, values: Values = ()) -> list[Values]:
        try:
            cursor = self._db.execute(sql.replace("?", "%s"), values or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise self._error(error) from None

    @property
    def in_transaction(self) -> bool:
        return self._db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):  # unlock now: a server ends a closed connection only after a while
            self._db.execute("SELECT pg_advisory_unlock_all()")
        self._db.close()

    def _error(self, error: Exception) -> GradebookError:
        return GradebookError(f"{self.where}: {' '.join(str(error).split())[:300]}")
