"""A kit with all files that an instructor may have, and sandboxes in which a submission's code runs."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grader.sandbox import Limits, Sandbox, available
from lab.harness.runner import Runner

KIT = Path(__file__).resolve().parents[2]


SECRET = "the-expected-value-41.97"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit with all files that an instructor may have. Each hidden file contains SECRET."""
    root = tmp_path_factory.mktemp("kit")
    for name in ("lab/__init__.py", "tests/__init__.py", "tests/ddp/__init__.py", "tests/ddp/probes.py",
                 "tests/ddp/probes_more.py"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("WHERE = __file__\n")
    for name in HIDDEN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(SECRET)
    for student in ("alice", "bob"):
        (root / "work" / student / "ddp").mkdir(parents=True)
        (root / "work" / student / "ddp" / "naive.py").write_text(SECRET if student == "bob" else "MINE = 1\n")
    (root / "work" / "alice" / "leak.py").symlink_to(root / "gradebook.sqlite")
    return root


HIDDEN = [
    "tests/ddp/test_ddp.py", "tests/kit/__init__.py", "tests/conftest.py", "reference/ddp/naive.py",
    "grader/judge.py", "examples/expected.json", "gradebook.sqlite", "assignment.toml", ".git/config",
    "student/ddp/naive.py",
]  # fmt: skip


def box(kit: Path, isolation: str = "bubblewrap", student: str = "alice", python: str = sys.executable, **limits: int):
    if isolation != "uid" and (reason := available()[isolation]):
        pytest.skip(reason)
    return Sandbox(isolation, kit / "work" / student, kit, Limits(**limits), python=python)


@contextlib.contextmanager
def runner_in(isolation: str, impl: Path, **options: object) -> Iterator[Runner]:
    """Yield a runner of this implementation in a sandbox of the whole kit."""
    if why := available()[isolation]:
        pytest.skip(why)
    with Sandbox(isolation, impl, KIT) as box, contextlib.closing(Runner(box, **options)) as runner:
        yield runner


def started(box: Sandbox, code: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a process in the sandbox. Return it, and the first line that it printed."""
    process = box.open(["-c", "import json, os, sys, time\n" + code, *arguments], {})
    assert process.stdout is not None
    return process, process.stdout.readline().decode() or pytest.fail(box.error_output(process))


def in_a_box(kit: Path, code: str, isolation: str = "bubblewrap", **limits: int):
    """Run `code` like a student's code, and return the JSON that it prints."""
    with box(kit, isolation, **limits) as sandbox:
        process = sandbox.open(["-c", "import json, os, sys, time\n" + code], {"GIVEN": "yes"})
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, sandbox.error_output(process)
        return json.loads(out)


@pytest.fixture
def boxed(kit: Path):
    return lambda code, **options: in_a_box(kit, code, **options)
