"""`make gpu` without a GPU: parts that can run do, a failing part does not end others, and a later call continues."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata

from packaging.requirements import Requirement

from benchmarks import gpu
from lab.course.assignment import ROOT


def test_gpu_run_continues_past_failures_and_skips_passed_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "STATE", tmp_path / "gpu.json")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "ran").mkdir()
    count = "import pathlib, uuid; pathlib.Path('ran', uuid.uuid4().hex).touch()"
    parts = [
        gpu.Part("fails", ("-c", "raise SystemExit(3)"), 0, 30.0),
        gpu.Part("hangs", ("-c", "import time; time.sleep(60)"), 0, 1.0),
        gpu.Part("big", ("-c", ""), 99, 30.0),
        gpu.Part("small", ("-c", "raise SystemExit(3)"), 99, 30.0, rehearsal=("-c", "")),
        gpu.Part("works", ("-c", count), 0, 30.0),
    ]
    for _ in range(2):
        gpu.run(parts, tmp_path / "gpu.json")
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            "fails: failed with exit code 3: see gpu-fails.log",
            "hangs: stopped after 1 s: see gpu-hangs.log",
            "big: not run: needs 99 GPUs",
            "small: rehearsed: needs 99 GPUs",
            "works: passed",
        ]
    assert len([*(tmp_path / "ran").iterdir()]) == 1, "what passed is not run again"
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["fails"]["result"].startswith("failed")


BLOCKED = """
import importlib, sys

blocked, modules, tests = map(str.split, sys.argv[1:])
sys.modules.update(dict.fromkeys(blocked))  # None: as if they were not installed
for module in modules:
    importlib.import_module(module)
import pytest
sys.exit(pytest.main(["--collect-only", "-q", *tests]))
"""


def test_gpu_parts_import_without_optional_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {Requirement(text).name for extra in project["optional-dependencies"].values() for text in extra}
    blocked = {name for name, dists in metadata.packages_distributions().items() if {d.lower() for d in dists} & extras}
    assert {"yaml", "tomlkit", "hypothesis"} <= blocked
    modules = ["benchmarks.gpu", *(p.arguments[1] for p in gpu.PARTS if p.arguments[1] not in ("lab", "pytest"))]
    tests = [a for part in gpu.PARTS for a in part.arguments if a.startswith("tests/")]
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, " ".join(blocked), " ".join(modules), " ".join(tests)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ".", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
