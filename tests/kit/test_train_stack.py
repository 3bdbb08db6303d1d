"""What `lab train` trains: refusals, stand-ins in place of what is unsolved, and the same batches after a restart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lab.commands import capstone
from lab.course.assignment import ROOT
from lab.harness.progress import Progress
from lab.measure.throughput import step_flops
from lab.model.transformer import SIZES
from lab.train import loop as train
from lab.train.stack import pieces


@pytest.fixture
def nothing_passes(monkeypatch):
    monkeypatch.setattr(capstone, "remembered", Progress)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "nowhere"], "expected --compare reference, a folder or stand-ins, got 'nowhere'"),
        (["--mesh", "data=2,tensor=2"], "expected mesh.compose to pass"),
        (["--steps", "0"], "--steps of at least 1, got 0"),
        (["--mesh", "date=2"], "'date=2'"),
        (["--mesh", "data=2,tensor=0"], "of 1 or more each, got 'tensor=0'"),
        (["--replace", "nope"], "ids of exercises, got 'nope'"),
        (["--stack", "data", "--mesh", "pipe=2"], "expected --mesh data=… alone with --stack data"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_train_refuses_in_one_line_before_any_rank_starts(nothing_passes, monkeypatch, capfd, arguments, words):
    monkeypatch.setattr(capstone, "launch", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(SystemExit) as ended:
        capstone.main(arguments, Console())
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_restarted_rank_does_not_say_the_same_again(monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(SystemExit):
        train.parse(["--steps", "0"])
    assert not capfd.readouterr().err


def test_what_is_unsolved_has_a_stand_in_and_is_told(nothing_passes):
    cpu = torch.device("cpu")
    options = capstone.parse([])
    assert (options.stack, options.mesh) == ("data", {"data": 2})
    assert capstone.lacking(options) == pieces("data", cpu)
    told = "own: nothing yet; a stand-in trains for each of these until it passes: flash_attention.tiled_forward"
    assert told in capstone.of_what(options, capstone.lacking(options))
    whole = capstone.parse(["--impl", "reference"])
    assert (whole.stack, whole.mesh) == ("mesh", {"data": 2, "tensor": 2})
    assert capstone.lacking(whole) == []
    some = capstone.parse(["--impl", "reference", "--replace", "mesh.route"])
    assert capstone.lacking(some) == ["mesh.route"]


def test_what_a_rank_is_told_is_what_was_asked(nothing_passes):
    asked = capstone.parse(["--impl", "reference", "--experts", "4", "--fsdp", "--lr", "0.01", "--seed", "7"])
    told = train.parse(capstone.said(asked, ["mesh.route"]), train.make_parser())
    assert told.replace == ["mesh.route"]
    assert {k: v for k, v in vars(asked).items() if k in vars(told)} | {"replace": ["mesh.route"]} == vars(told)


def test_without_a_reference_stand_ins_are_compared(nothing_passes, monkeypatch):
    options = capstone.parse(["--impl", "reference", "--mesh", "data=2,tensor=2", "--compare", "reference"])
    assert capstone.other(options).mesh == {"data": 2, "tensor": 2}
    monkeypatch.setattr(train, "folder_of", lambda name: ROOT / "no such")
    other = capstone.other(options)
    assert (other.everything, other.stack, other.mesh) == (True, "data", {"data": 4})
    assert train.parse(capstone.said(other, []), train.make_parser()).mesh == {"data": 4}


def test_who_goes_on_sees_the_batches_that_would_have_come():
    run = SimpleNamespace(options=SimpleNamespace(seed=1, sequences=16, context=128))
    train.Run._same_data(run, {"losses": []})  # of an earlier kit, which did not keep it
    train.Run._same_data(run, {"data": {"seed": 1, "sequences": 16, "context": 128}})
    for name, other in (("seed", 2), ("sequences", 8), ("context", 64)):
        with pytest.raises(ValueError, match=f"--{name} {other}"):
            train.Run._same_data(run, {"data": {"seed": 1, "sequences": 16, "context": 128, name: other}})


def test_the_flops_of_a_step_are_those_of_its_products():
    tiny = SIZES["tiny"]
    assert step_flops(tiny, 16, 128) == 6 * 2048 * (108_544 + 128 * 64 * 2)
    assert step_flops(tiny, 16, 128, k=2) - step_flops(tiny, 16, 128) == 6 * 2048 * 2 * 3 * 64 * 176
