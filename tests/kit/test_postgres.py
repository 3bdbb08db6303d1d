"""A gradebook in PostgreSQL passes the tests of a gradebook in a file. This test starts the server."""

import getpass
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grader.gradebook import Gradebook, GradebookError
from grader.postgres import psycopg

from .test_gradebook import (  # noqa: F401
    test_a_second_grader_is_refused_and_a_reader_is_not,
    test_gradebook_returns_records_as_written,
)
from .test_policy import test_decisions_survive_regrade_and_entries_are_append_only  # noqa: F401
from .test_serve import (  # noqa: F401
    app,
    filled,
    test_concurrent_decisions_save_exactly_one,
    test_decision_during_grading_gets_503_and_keeps_form_input,
    test_second_marker_gets_conflict_page_with_first_mark,
)

SCHEMAS = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a new server with a database. PostgreSQL refuses to run as root, so root starts it as "nobody"."""
    found = [shutil.which("initdb"), *map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    initdb = next(filter(None, found), None)
    if initdb is None or psycopg is None:
        pytest.skip("no PostgreSQL on this machine: apt-get install postgresql; pip install '.[postgres]'")
    name = "nobody" if os.geteuid() == 0 else getpass.getuser()
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        shutil.chown(folder, name)

        def run(*command: object) -> None:
            """Run a command as that user, in a folder that all users may enter."""
            other = {"user": name} if os.geteuid() == 0 else {}
            subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, cwd="/", **other)

        run(initdb, "-D", f"{folder}/data", "-A", "trust", "-E", "UTF8", "--no-locale", "-U", name, "--no-sync")
        control = Path(initdb).resolve().with_name("pg_ctl"), "-w", "-D", f"{folder}/data", "-l", f"{folder}/log"
        run(*control, "-o", f"-k {folder} -c listen_addresses=", "start")
        yield f"postgresql:///postgres?host={folder}&user={name}"
        run(*control, "stop")


@pytest.fixture
def path(server: str, tmp_path: Path) -> Iterator[Path]:
    """The path of a gradebook in a new schema."""
    schema = f"course_{next(SCHEMAS)}"
    with psycopg.connect(server, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}")
    (tmp_path / "gradebook.address").write_text(f"{server}&options=-csearch_path%3D{schema}\n")
    yield tmp_path / "gradebook.sqlite"
    assert not (tmp_path / "gradebook.sqlite").exists(), "the class is not in a file"


@pytest.fixture
def out(path: Path) -> Path:
    return filled(path.parent)


def test_wrong_postgres_address_gives_one_line_error(path: Path):
    path.with_suffix(".address").write_text("postgresql://127.0.0.1:1/nowhere")
    with pytest.raises(GradebookError, match=r"gradebook\.address: connection") as error:
        Gradebook(path)
    assert "\n" not in str(error.value)
