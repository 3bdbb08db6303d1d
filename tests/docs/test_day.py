"""Runs a student's day in a toy kit: check, change, watch, explain. Stand-ins train like the reference."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lab.course.assignment import ROOT

from ..kit import toy

WAIT_S = 120
STUB = 'def {name}(x):\n    """One more."""\n    raise NotImplementedError("toys.{name}: One more.")\n'


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Path:
    kit = toy.build(tmp_path_factory.mktemp("day"), 0)
    (kit / "student" / "toys").mkdir(parents=True)
    (kit / "lab" / "explanations" / "toys.md").write_text("## toys.add\nOne more.\n\nSource: Peano 1889.\n")
    extra_test = "\n\n@exercise(NAME, kind='property')\ndef test_told(run):\n    measured('sum', 2, 3, at_most=True)\n"
    text = (kit / "tests" / "toys" / "test_add.py").read_text()
    (kit / "tests" / "toys" / "test_add.py").write_text(f"from lab.harness.judge import measured\n{text}{extra_test}")
    return kit


def write(kit: Path, **files: str) -> None:
    for name in toy.NEEDS:
        (kit / "student" / "toys" / f"{name}.py").write_text(files.get(name, STUB.format(name=name)))


def lab(kit: Path, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(kit), "COLUMNS": "200"}
    command = [sys.executable, "-m", "lab", *arguments]
    done = subprocess.run(command, cwd=kit, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


def test_lab_check_and_explain_follow_edits(kit):
    """Run the commands in one session, as a student does."""
    write(kit)
    code, text = lab(kit, "check")
    assert code == 1
    assert "toys.add: not written yet" in text
    code, text = lab(kit, "explain", "toys.add")
    assert code == 2
    assert text.startswith("lab: explain: toys.add does not pass yet")

    write(kit, add="def add(x):\n    return x + 2\n")
    code, text = lab(kit, "check")
    assert code == 1
    assert re.search(r"toys\.add · numerics · test_add\n +assert \d+ == ", text), text

    write(kit, add=toy.RIGHT["add"])
    assert "student/toys/add.py changed since toys.add was tested" in lab(kit)[1]
    code, text = lab(kit, "check")
    assert code == 0, text
    assert "toys.add passes; what it is about, and what was measured: lab explain toys.add" in text
    assert "next: toys.double" in text
    code, text = lab(kit, "explain")
    assert code == 0, text
    assert "Peano" in text
    assert re.search(r"sum +2 +≤ 3", text), text

    write(kit, **toy.RIGHT)
    code, text = lab(kit, "check")
    assert code == 0, text
    assert "changed: toys.double, toys.apart" in text
    assert "toys.add  " not in text, "what did not change was tested again"
    assert lab(kit, "check") == (0, "Nothing changed since, and every exercise that runs here passes.\n")


def test_watch_retests_saved_files_and_ends_on_interrupt(kit):
    write(kit, add=toy.RIGHT["add"])
    (kit / ".cache" / "progress.json").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "lab", "watch"], cwd=kit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(kit), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )  # fmt: skip
    timer = threading.Timer(3 * WAIT_S, process.kill)
    timer.start()

    def until(words: str) -> str:
        """Read output up to a line that contains `words`, and return it. Raises AssertionError at the end of output."""
        output = ""
        for line in process.stdout:
            output += line
            if words in line:
                return output
        raise AssertionError(f"no {words!r} in {output}")

    try:
        until("toys.add passes")
        until("watching student/")
        (kit / "student" / "toys" / "apart.py").write_text("def apart(x):\n    return x\n")
        assert "toys.apart · numerics" in until("watching student/")
        (kit / "student" / "toys" / "apart.py").write_text(toy.RIGHT["apart"])
        assert "toys.add  " not in until("toys.apart passes")
        until("watching student/")
        children = toy.family(process)
        process.send_signal(signal.SIGINT)
        until("no longer watching")
        assert process.wait() == 0
        assert not toy.outlived(children), "the zygote outlived it"
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def test_a_run_that_is_interrupted_is_not_remembered_as_passed(kit):
    write(kit, **toy.RIGHT)
    slow = kit / "tests" / "toys" / "test_slow.py"
    slow.write_text(
        'from lab.harness.pytest_plugin import exercise\n\n\n@exercise("toys.apart", kind="property")\n'
        "def test_slow(run):\n    raise KeyboardInterrupt\n"
    )
    (kit / ".cache" / "progress.json").unlink(missing_ok=True)
    try:
        code, _ = lab(kit, "check", "toys.apart")
        assert code == 2
        saved = kit / ".cache" / "progress.json"
        assert not saved.exists() or "toys.apart" not in json.loads(saved.read_text())["rests"]
    finally:
        slow.unlink()


SMALL = ["--steps", "4", "--warm-up", "1", "--context", "16", "--sequences", "8"]


def test_stand_ins_train_as_the_reference_does(tmp_path):
    """On stubs, stand-ins replace all exercises and are reported. Losses equal those of the solutions."""
    stubs = tmp_path / "stubs"
    stubs.symlink_to(ROOT / "student")
    command = [sys.executable, "-m", "lab", "train", *SMALL, "--folder", str(tmp_path / "out"), "--impl", str(stubs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = subprocess.run(
        [*command, "--compare", "reference"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "own: nothing yet; a stand-in trains for each" in " ".join(text.split())
    assert "all 6 pieces are its own" in text
    got, want = (json.loads((tmp_path / "out" / n / "losses.json").read_text()) for n in ("yours", "other"))
    assert len(got) == 4
    assert got == pytest.approx(want, rel=1e-4)
    report = json.loads((tmp_path / "out" / "other" / "run.json").read_text())
    assert 0 < report["mfu"] < 1
    assert report["state_bytes"] > 0
    assert (tmp_path / "out" / "compare.png").stat().st_size > 1000
    for column in ("tokens/s", "MFU", "peak memory"):
        assert column in text
