"""`make gpu` on a machine without one: what can run does, a part that fails ends no other, and it goes on later."""

from __future__ import annotations

import argparse
import json

from benchmarks import gpu, static

from .classroom import refused


def test_a_fault_in_a_part_does_not_end_the_others_and_a_second_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "STATE", tmp_path / "gpu.json")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "ran").mkdir()
    count = "import pathlib, uuid; pathlib.Path('ran', uuid.uuid4().hex).touch()"
    parts = [
        gpu.Part("fails", ("-c", "raise SystemExit(3)"), 0, 30.0),
        gpu.Part("hangs", ("-c", "import time; time.sleep(60)"), 0, 1.0),
        gpu.Part("big", ("-c", ""), 99, 30.0),
        gpu.Part("works", ("-c", count), 0, 30.0),
    ]
    for _ in range(2):
        assert gpu.main(parts, tmp_path / "gpu.json") == 2
        said = capsys.readouterr().out.splitlines()
        assert said == [
            "fails: failed with exit code 3: see gpu-fails.log",
            "hangs: stopped after 1 s: see gpu-hangs.log",
            "big: not run: needs 99 GPUs",
            "works: passed",
        ]
    assert len([*(tmp_path / "ran").iterdir()]) == 1, "what passed is not run again"
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["fails"]["result"].startswith("failed")


def test_a_peer_for_the_static_race_may_import_its_neighbours(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "common.py").write_text("SCALE = 2\n")
    (tmp_path / "kernels" / "mine.py").write_text(
        "from .common import SCALE\n\n\ndef forward(q):\n    return q * SCALE\n"
    )
    name, forward = static.forward_of(f"{tmp_path}/kernels/mine.py:forward")
    assert (name, forward(3)) == ("forward", 6)
    with refused(argparse.ArgumentTypeError, "expected a function in", "it has no 'backward'"):
        static.forward_of(f"{tmp_path}/kernels/mine.py:backward")
