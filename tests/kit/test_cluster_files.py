"""What goes between the head and its jobs: answers, their folder, and the options of a cluster."""

from __future__ import annotations

import os
import socket

import pytest
from typer.testing import CliRunner

from grader import cli, schedulers
from grader import cluster as c
from grader.graded import Flag, Graded
from grader.schedulers import Cluster
from lab.course.scoring import Result
from lab.harness.files import sweep_halves, write_whole

from .classroom import refused
from .test_cluster import graded, leave


def test_halves_of_dead_writers_are_swept_and_no_others(tmp_path, monkeypatch):
    """The name that a writer gives and the one that is swept must agree."""
    seen = []
    monkeypatch.setattr(os, "replace", lambda half, path: seen.append(half) or half.rename(path))
    write_whole(tmp_path / "a.csv", "a")
    os.umask(mask := os.umask(0))
    assert (tmp_path / "a.csv").stat().st_mode & 0o777 == 0o666 & ~mask, "it is for all who may read the folder"
    here, gone, name = f".{os.getpid()}.", f".{2**22 + 1}.", socket.gethostname()  # above the kernel's highest
    dead = seen[0].name.replace(here, gone)
    halves = [seen[0].name, dead.replace(name, f"other-{name}"), f".a.csv{gone}tmp"]
    for half in (dead, *halves):
        (tmp_path / half).write_text("half")
    sweep_halves(tmp_path.parent)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.csv", *halves])


@pytest.mark.parametrize("text", ["[]", "3", '{"graded": "3"}', '{"graded": "{}"}', '{"graded": null}', "\x00", "{}"])
def test_what_is_no_answer_or_half_of_one_is_not_read_as_one(tmp_path, text):
    assert c.read(tmp_path / "a") is None, "there is nothing yet"
    leave(tmp_path / "a", {"graded": graded("ada").packed()})
    assert c.read(tmp_path / "a") == graded("ada")
    whole = (tmp_path / "a").read_text()
    for half in (text, *(whole[:cut] for cut in range(0, len(whole), 7))):
        (tmp_path / "a").write_text(half)
        assert c.read(tmp_path / "a") is None, half


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u202e", '{"a": ', "é" * 9])
def test_nothing_from_a_submission_is_lost_or_breaks_an_answer(tmp_path, text):
    said = Result("ddp.naive", "numerics", text, text, "failed", text, text, float("inf"), text, text)
    g = Graded(text, text, text, "refused", text, 0.5, [text], [said], [Flag(text, text)])
    leave(tmp_path / "a", {"graded": g.packed()})
    assert c.read(tmp_path / "a") == g


def test_options_reach_their_track(tmp_path):
    on = Cluster("slurm", tmp_path, 2, ("gpu.partition=h100", "partition=teaching", "exclusive", "mem=4G"))
    cpu, gpu = on.asked("cpu"), on.asked("gpu")
    assert (cpu["partition"], cpu["mem"], cpu["exclusive"], "gres" in cpu) == ("teaching", "4G", True, False)
    assert (gpu["partition"], gpu["mem"], gpu["exclusive"], gpu["gres"]) == ("h100", "4G", True, "gpu:2")
    assert cpu["requeue"] is gpu["requeue"] is True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cluster", "nope"], "--cluster: expected one of slurm, local, got 'nope'"),
        (["--gpus", "1"], "--gpus and --slurm go with --cluster slurm"),
        (["--slurm", "partition=x"], "--gpus and --slurm go with --cluster slurm"),
        (["--cluster", "slurm", "--slurm", "-x"], "--slurm: expected an option of sbatch, as partition=teaching"),
        (["--cluster", "slurm"], "sbatch, squeue, scancel, scontrol, srun not found; run it on a node that submits"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch, options, says):
    monkeypatch.setattr(schedulers.shutil, "which", lambda name: None)
    (tmp_path / "class" / "ada" / "ddp").mkdir(parents=True)
    command = ["grade", str(tmp_path / "class"), "--out", str(tmp_path / "out"), "--isolation", "process", *options]
    with refused(cli.Wrong, says):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert not (tmp_path / "out").exists()
