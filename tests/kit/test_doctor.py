"""On a bad machine each check gives advice. Only problems that stop grading are fatal."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from grader import cli, schedulers
from grader import doctor as grader_doctor
from lab.commands import cli as lab_cli
from lab.commands import doctor
from lab.commands.doctor import Finding

GOOD = {"torch": "2.13.0+cpu", "triton": "3.7.1", "numpy": "2.4.6"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """`machine(torch="2.9.0", …)` fakes installed versions; None: not installed."""

    def install(**versions: str | None) -> None:
        found = {**GOOD, **versions}
        monkeypatch.setattr(doctor, "installed", lambda name: Version(v) if (v := found.get(name)) else None)

    install()
    return install


def check(findings, what: str, found: str, advice: str = "", fatal: bool = False) -> None:
    """Assert that `findings` contains this one. advice: "" if there is nothing to do."""
    (finding,) = [f for f in findings if f.what == what]
    assert found in finding.found
    assert advice in finding.do
    assert (bool(finding.do), finding.fatal) == (bool(advice), fatal)


def test_unsupported_version_gets_install_advice(machine):
    check(doctor.versions(), "torch", "2.13.0")
    machine(torch="2.9.1", numpy=None)
    check(doctor.versions(), "torch", "2.9.1", "pip install 'torch>=2.11'", fatal=True)
    check(doctor.versions(), "numpy", "not installed", "pip install 'numpy'", fatal=True)
    machine(torch="2.99.0")
    check(doctor.versions(), "torch", "2.99.0, newer than 2.13.0, which was tried", "torch==2.13.0")


def test_triton_interpreter_check_reports_trial_result(machine, monkeypatch):
    answers = iter([{"sum": 6.0}, {"sum": 0.0}, {"error": "no such"}])
    monkeypatch.setattr(doctor, "run_python", lambda code, env=None: next(answers))
    for found, do in (("runs a kernel", ""), ("a sum of 0.0 instead of 6", "constraints"), ("no such", "constraints")):
        check([doctor.triton()], "Triton's interpreter", found, do)


def test_run_python_handles_output_errors_crashes_and_hangs(monkeypatch):
    assert doctor.run_python("print('noise')\nsay({'a': 1})\nprint('more')") == {"a": 1}
    assert doctor.run_python("raise RuntimeError('driver too old')") == {"error": "RuntimeError: driver too old"}
    assert doctor.run_python("import os; os.kill(os.getpid(), 9)") == {"error": "exit code -9"}
    monkeypatch.setattr(doctor, "PYTHON_S", 1.0)
    assert doctor.run_python("while True: pass") == {"error": "no answer in 1 s"}


H200 = {"name": "NVIDIA H200", "capability": [9, 0], "bytes": 150 << 30}
ROW = ("NVIDIA H200", "580.65.06", "Disabled")


def test_gpu_check_reports_driver_and_torch_findings(monkeypatch):
    def findings(rows, built, *devices):
        monkeypatch.setattr(doctor, "driver", lambda: rows)
        monkeypatch.setattr(doctor, "run_python", lambda code, env=None: {"built": built, "devices": devices})
        return doctor.gpu()

    check(findings([], None), "GPU", "none", "not run")
    check(findings([ROW] * 2, "13.0", H200, H200), "GPU in torch", "2 × NVIDIA H200, sm_90, 150 GiB")
    check(findings([ROW], None), "GPU in torch", "built without CUDA", "a CUDA build")
    check(findings([("A100", "580", "Enabled")], "13.0", H200), "GPU 0", "A100, driver 580", "MIG is on")
    check(findings([("T4", "580", "[N/A]")], "13.0", {**H200, "capability": [7, 5]}), "GPU in torch", "sm_75", "sm_80")


NO_BWRAP = "bubblewrap is not installed; run: apt-get install bubblewrap"
NO_UID = "uid isolation needs root; run with: sudo"


def test_isolation_is_fatal_only_without_any_sandbox(monkeypatch):
    works = {"bubblewrap": "", "uid": NO_UID, "process": ""}
    monkeypatch.setattr(grader_doctor, "available", lambda: works)
    check(grader_doctor.isolation(), "isolation bubblewrap", "works")
    check(grader_doctor.isolation(), "isolation uid", "needs root")
    works["bubblewrap"] = NO_BWRAP
    check(grader_doctor.isolation(), "isolation bubblewrap", "", "run: apt-get install bubblewrap", fatal=True)
    check(grader_doctor.isolation(), "isolation uid", "needs root", "run with: sudo")
    works["uid"] = ""
    check(grader_doctor.isolation(), "isolation bubblewrap", "", "bubblewrap; until then: --isolation uid")


def test_low_memory_or_disk_gets_advice_to_free_space(monkeypatch):
    memory, disk = SimpleNamespace(total=14 << 30, available=300 << 20), SimpleNamespace(free=64 << 20)
    monkeypatch.setattr(grader_doctor.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    assert [f.what for f in doctor.free_space() if f.fatal] == ["free memory"]
    disks = [f for f in grader_doctor.free_space() if f.what.startswith("room in")]
    assert all(f.do.startswith("free ") for f in disks)
    assert [f.fatal for f in disks] == ["shm" not in f.what for f in disks], "/dev/shm alone stops nothing"


def test_slurm_check_reports_version_partitions_and_controller(monkeypatch):
    commands = {"sbatch", "squeue", "scancel", "scontrol", "srun"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in commands else None)
    monkeypatch.setattr(schedulers, "answers", lambda: True)
    sinfo = "class*|up|3|idle|gpu:h100:8\nold|up|1|down*|(null)\n"
    outputs = {"--version": "slurm 22.05.8\n"}
    monkeypatch.setattr(grader_doctor, "output", lambda command: outputs.get(command[-1], sinfo))
    found = list(grader_doctor.slurm())
    check(found, "Slurm", "22.05.8")
    check(found, "partition class*", "up, 3 nodes idle, gpu:h100:8")
    check(found, "partition old", "down", "sinfo -R")
    monkeypatch.setattr(schedulers, "answers", lambda: False)
    check(grader_doctor.slurm(), "Slurm", "", "scontrol ping")
    commands.clear()
    check(grader_doctor.slurm(), "Slurm", "none", "only")


@pytest.mark.parametrize(("module", "command"), [(doctor, lab_cli), (grader_doctor, cli)])
@pytest.mark.parametrize("fatal", [False, True])
def test_doctor_prints_table_or_json_and_fails_only_if_fatal(monkeypatch, module, command, fatal):
    rows = [Finding("torch", "2.13.0"), Finding("GPU", "[bold]none", "buy one"), Finding("box", "none", "x", fatal)]
    monkeypatch.setattr(module, "examine", lambda: iter(rows))
    run = CliRunner().invoke(command.app, ["doctor", "--json"])
    assert (run.exit_code, json.loads(run.stdout)) == (fatal, [vars(r) for r in rows])
    run = CliRunner().invoke(command.app, ["doctor"])
    assert run.exit_code == fatal
    assert re.search(r"^GPU +\[bold\]none +buy one", run.stdout, re.MULTILINE)


def test_doctor_findings_cover_this_machine_on_one_line_each(monkeypatch):
    """Runs the real checks, except those that import torch."""
    monkeypatch.setattr(doctor, "ranks", lambda: iter(()))
    monkeypatch.setattr(doctor, "run_python", lambda code, env=None: {"sum": 6, "built": None, "devices": []})
    found = {f.what: f for f in grader_doctor.examine()}
    for what in ("isolation bubblewrap", "python", "torch", "triton", "numpy", "GPU", "cores", "memory"):
        assert found[what].found
    assert all("\n" not in f.found + f.do for f in found.values())
