"""A gradebook in PostgreSQL keeps what the one in a file keeps; the server is one that this test starts."""

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
    test_what_was_recorded_comes_back,
)
from .test_policy import test_decisions_survive_a_regrade_and_nothing_is_changed_behind_them  # noqa: F401
from .test_serve import (  # noqa: F401
    app,
    filled,
    test_of_ten_who_save_at_the_same_moment_one_does,
    test_the_second_of_two_who_mark_is_shown_what_the_first_gave,
    test_while_a_grader_is_at_work_nothing_is_lost_and_the_page_says_so,
)

SCHEMAS = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with a database of its own. PostgreSQL does not run as root: then as "nobody"."""
    found = [shutil.which("initdb"), *map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    initdb = next(filter(None, found), None)
    if initdb is None or psycopg is None:
        pytest.skip("no PostgreSQL on this machine: apt-get install postgresql; pip install '.[postgres]'")
    name = "nobody" if os.geteuid() == 0 else getpass.getuser()
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        shutil.chown(folder, name)

        def run(*command: object) -> None:
            """As that user, in a folder that anybody may enter."""
            other = {"user": name} if os.geteuid() == 0 else {}
            subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, cwd="/", **other)

        run(initdb, "-D", f"{folder}/data", "-A", "trust", "-E", "UTF8", "--no-locale", "-U", name, "--no-sync")
        control = Path(initdb).resolve().with_name("pg_ctl"), "-w", "-D", f"{folder}/data", "-l", f"{folder}/log"
        run(*control, "-o", f"-k {folder} -c listen_addresses=", "start")
        yield f"postgresql:///postgres?host={folder}&user={name}"
        run(*control, "stop")


@pytest.fixture
def path(server: str, tmp_path: Path) -> Iterator[Path]:
    """The path of a gradebook in a schema of its own."""
    schema = f"course_{next(SCHEMAS)}"
    with psycopg.connect(server, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}")
    (tmp_path / "gradebook.address").write_text(f"{server}&options=-csearch_path%3D{schema}\n")
    yield tmp_path / "gradebook.sqlite"
    assert not (tmp_path / "gradebook.sqlite").exists(), "the class is not in a file"


@pytest.fixture
def out(path: Path) -> Path:
    return filled(path.parent)


def test_an_address_that_is_wrong_is_one_line(path: Path):
    path.with_suffix(".address").write_text("postgresql://127.0.0.1:1/nowhere")
    with pytest.raises(GradebookError, match=r"gradebook\.address: connection") as error:
        Gradebook(path)
    assert "\n" not in str(error.value)
