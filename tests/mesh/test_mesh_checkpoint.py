"""Checkpoints that any mesh writes and any other mesh reads.

Must hold: training that is saved on one mesh and continued on a second and a third gives the parameters of
uninterrupted training. A kill during a save leaves the previous checkpoint intact. The disk holds each number once, in
safetensors and JSON. Nothing is gathered, neither by messages nor in memory.
Typical fakes: one state_dict per rank (meshes have other ranks); all ranks write everything (caught by bytes on the
disk); rank 0 writes for all (caught by bytes sent and by the size of its file); the whole model assembled on each rank
(caught by memory); one axis forgotten (columns, experts, a tied head, shards, padding); moments, step counts or
hyperparameters that start anew; files overwritten, or named in the index before they exist.
"""

import contextlib
import json
import math

import pytest
import safetensors.torch
import torch

from lab.harness.judge import close, never_holds
from lab.harness.pytest_plugin import exercise

from . import probes_checkpoint as probes
from .carried import traced
from .placed import draw_layout, draw_values, one_process, shapes_of
from .probes_placed import part_of

CHECKPOINT = "mesh.mesh_checkpoint"
ADAMW = {"lr": 0.05, "betas": [0.8, 0.9], "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9}

CHAINS = {  # options of the model; then (mesh, small), with FSDP if small is a number
    "tensor": ({}, [({"tensor": 2}, None), ({"tensor": 3}, None), ({}, None), ({"tensor": 4}, None)]),
    "shards": ({}, [({"data": 5}, 0), ({"data": 2, "tensor": 2}, 30), ({"data": 2}, None), ({"data": 3}, 0)]),
    "experts": ({"experts": 4}, [({"expert": 2}, None), ({"data": 2, "expert": 2}, 0), ({"expert": 4}, None)]),
    "tied": ({"tied": True}, [({"pipe": 2}, None), ({"tensor": 2}, None), ({"data": 2, "pipe": 2}, 0), ({}, None)]),
    "all": (
        {"experts": 2, "tied": True},
        [({"pipe": 2, "expert": 2, "tensor": 2}, None), ({"data": 3}, 0), ({"data": 2, "pipe": 2, "tensor": 2}, 0)],
    ),
}


def check_loaded(ranks: list, layout: dict, want: dict, plain: dict, what: str) -> None:
    """Assert that each rank has the saved tensors when load() returns. want, plain: by key, then name."""
    for rank, got in enumerate(ranks):
        where, keys = f"{what}, rank {rank}, when load() returns", {(name, key) for name, _, _, key, _ in got["loaded"]}
        lost = [(n, key) for key, saved in want.items() for n in saved if (n, "") in keys and (n, key) not in keys]
        assert not lost, f"{where}: the optimizer has no {' of '.join(lost[0][::-1])}: a state is its parameter's"
        for piece in got["loaded"]:
            if piece[0] in want.get(piece[3], {}):
                check_piece(
                    piece, layout, want, plain, where, "are all files read, and does each piece go to its `start`?"
                )


def check_piece(piece: list, layout: dict, want: dict, plain: dict, what: str, cause: str) -> None:
    """Assert that a piece of a rank (see `probes.copied_pieces`) has the numbers of the whole tensors."""
    name, index, start, key, got = piece
    true, yardstick = (
        part_of(name, full[key][name], index, layout["degrees"].get("tensor", 1)).flatten()[start : start + len(got)]
        for full in (want, plain)
    )
    close(got, true, yardstick, f"{what}: {f'{key} of ' if key else ''}{name} from {start} on", cause=cause)


def go(run, rng, model: dict, meshes: list, name: str, options: dict) -> list:
    """Run one session per mesh; return (layout, each rank's values and messages) per session."""
    layout = draw_layout(rng, {}, **model)
    values, files, trained = draw_values(rng, layout), dict[str, bytes](), []
    applied, sessions = [], []
    changed = {k: [0.5, 0.6] if k == "betas" else 0.7 for k in options}
    for number, (degrees, small) in enumerate(meshes):
        mesh = {**layout, "degrees": degrees, "small": small}
        gradients = [draw_values(rng, layout) for _ in range(rng.integers(1, 2))]
        for grads in gradients:
            del grads["norm.weight"]  # never trained, so it has no state
        initial = {n: torch.full_like(v, probes.BEFORE) for n, v in values.items()} if number else values
        applied += gradients
        ranks = traced(
            run, probes.session, mesh, name, changed if number else options, initial, gradients,
            {"session": number, "é": [0.5, None]}, world=math.prod(degrees.values()), folder=files,
            parts=["load", "steps", "save", "saved"],
        )  # fmt: skip
        files = ranks[0]["files"]
        sessions.append((mesh, ranks))
        path = " → ".join(f"{d or 'one rank'}{'' if s is None else ' sharded'}" for d, s in meshes[: number + 1])
        if number:
            check_loaded(ranks, mesh, *trained, f"{name}, {path}")
        for got in ranks:
            assert not got.get("stopped"), f"{name}, {path}: the first step after load() raised {got['stopped']}"
        trained = [one_process(name, options, values, applied, dtype) for dtype in (torch.float64, torch.float32)]
        for rank, got in enumerate(ranks):
            for piece in got["parameters"]:
                check_piece(
                    piece, mesh, *trained, f"{name}, {path}, rank {rank}", "not as if it had not been interrupted"
                )
            before = {"session": number - 1, "é": [0.5, None]} if number else None
            assert got["extra"] == before, f"{path}, rank {rank}: extra came back as {got['extra']}, was {before}"
            assert got["group"] == options, f"{path}, rank {rank}: hyperparameters {got['group']}, were {options}"
            if name == "AdamW":
                assert "betas" in got["tuples"], f"{path}, rank {rank}: betas came back as no tuple, as JSON has none"
                assert got["steps"] == [len(applied)], f"{path}, rank {rank}: steps {got['steps']}, not {len(applied)}"
    return sessions


@exercise(CHECKPOINT, kind="numerics")
@pytest.mark.parametrize("chain", CHAINS)
def test_training_goes_on_on_another_mesh(run, rng, chain):
    go(run, rng, *CHAINS[chain], "AdamW", ADAMW)


@exercise(CHECKPOINT, kind="numerics")
def test_what_does_not_fit_is_refused(run, rng):
    degrees = {"expert": 2}
    saved = draw_layout(rng, degrees, experts=4)
    longer = {**saved, "config": {**saved["config"], "context": 8}}  # has the same shapes
    layouts = {
        "saved": saved, "another config": longer, "more experts": {**saved, "experts": 6},
        "fewer experts": {**saved, "experts": 2},
    }  # fmt: skip
    values = {name: draw_values(rng, layout) for name, layout in layouts.items()}
    want = {"nothing saved": "FileNotFoundError", "extra": "TypeError", "odd": "TypeError",
            "groups, save": "ValueError", "groups, load": "ValueError", "refused saves, files": "[]"}  # fmt: skip
    for name in [*layouts][1:]:
        want |= {name: "ValueError", f"{name}, left alone": "True"}
    for rank, got in enumerate(run(probes.refused, layouts, values, world=2, folder={})):
        wrong = {name: got.get(name) for name in want if got.get(name) != want[name]}
        assert not wrong, f"rank {rank}: {wrong}, expected { {name: want[name] for name in wrong} }"


def numbers_of(layout: dict) -> int:
    """Return how many numbers are saved, with momentum and with padding of the vocabulary."""
    shapes = {n: [*s] for n, s in shapes_of(layout).items()}
    shapes["embedding.weight"][0] += -shapes["embedding.weight"][0] % layout["degrees"].get("tensor", 1)
    return sum(math.prod(s) * (1 if n == "norm.weight" else 2) for n, s in shapes.items())


def kind_of(raw: bytes) -> tuple[str, int]:
    """Return a file's kind, by its content, and the bytes of its tensors."""
    with contextlib.suppress(safetensors.SafetensorError):
        return "safetensors", sum(t.nbytes for t in safetensors.torch.load(raw).values())
    with contextlib.suppress(ValueError):
        json.loads(raw)
        return "json", 0
    return "other", 0


@exercise(CHECKPOINT, kind="property")
def test_each_number_is_written_once_by_who_has_it(run, rng):
    """Parameters and momentum of SGD, in float32. Files of an older checkpoint are gone, and no tensor is sent."""
    model = {"experts": 2, "tied": True}
    meshes = [({"data": 2, "tensor": 2}, 0), ({"pipe": 2, "expert": 2}, None), ({"data": 4}, 0)]
    for number, (layout, ranks) in enumerate(go(run, rng, model, meshes, "SGD", SGD)):
        files = {path: kind_of(data) for path, data in ranks[0]["files"].items()}
        odd = [path for path, (kind, _) in files.items() if kind == "other"]
        assert not odd, f"{odd} is neither JSON nor safetensors: a pickle can run code when it is loaded"
        want, found = 4 * numbers_of(layout), [size for _, size in files.values()]
        assert sum(found) <= want, (
            f"{layout['degrees']}: {sum(found):,} bytes of tensors on the disk, expected {want:,}: each number once, "
            "by the rank with coordinate 0 along copies, and files of an older checkpoint are gone"
        )
        flushed = {path for got in ranks for path in got["flushed"]}
        assert flushed >= set(files), (
            f"{sorted(set(files) - flushed)} may not be on the disk when power fails, and is named: os.fsync each file"
        )
        if number != 1:  # sharded meshes: all ranks hold about equally much
            assert max(found) <= 0.6 * sum(found), (
                f"{layout['degrees']}: files of {found} bytes: all write what they have"
            )
        for rank, got in enumerate(ranks):
            for what in ("load", "save"):
                sent = sum(row["bytes"] for row in got["sent"][what] if row["op"] not in ("recv", "barrier"))
                assert sent <= 4096, (
                    f"{layout['degrees']}, rank {rank}: to {what} it sent {sent:,} bytes: who has a number writes it, "
                    "and who needs it reads it"
                )


@exercise(CHECKPOINT, kind="property")
@pytest.mark.parametrize("small", [None, 0])
def test_loading_takes_two_tensors_at_most(run, rng, small):
    """Moments do not count, because the rank keeps them."""
    layout = {**draw_layout(rng, {}), "layers": 24}
    values = draw_values(rng, layout)
    (first,) = run.trace(probes.session, layout, "AdamW", ADAMW, values, [values], {}, world=1, folder={})
    sharded = {**layout, "degrees": {"data": 2}, "small": small}
    ranks = run(probes.session, sharded, "AdamW", ADAMW, values, [], {}, world=2, folder=first.files)
    largest = max(4 * v.numel() for v in values.values())
    total = 3 * sum(4 * v.numel() for v in values.values())
    for rank, got in enumerate(ranks):
        moments = 8 * got["numbers"]
        assert got["peak_bytes"] <= moments + 2 * largest + 2048, (
            f"rank {rank}, {'sharded' if small == 0 else 'whole'}: load held {got['peak_bytes']:,} bytes at once. Its "
            f"own moments are {moments:,}, the largest tensor is {largest:,}, all that was saved {total:,}: put one "
            "together, take your part, forget it"
        )


@exercise(CHECKPOINT, kind="property")
def test_no_rank_holds_the_whole_checkpoint(run, rng):
    """The kernel counts private memory, so memory outside torch counts too."""
    world, traces = 2, []
    for width, hidden, layers in ((12, 12, 2), (512, rng.integers(530, 550), 12)):
        layout = draw_layout(rng, {}, small=0)
        layout |= {"layers": layers, "config": {**layout["config"], "width": width, "hidden": hidden}}
        values, gradients = draw_values(rng, layout), [draw_values(rng, layout)]
        (first,) = run.trace(probes.session, layout, "AdamW", ADAMW, values, gradients, {}, world=1, folder={})
        traces.append(run.trace(
            probes.weighed, {**layout, "degrees": {"data": world}}, shapes_of(layout), world=world, private=True,
            folder=first.files,
        ))  # fmt: skip
    want = one_process("AdamW", ADAMW, values, gradients, torch.float32)
    part, full = (4 * 3 * sum(v.numel() for v in values.values()) // n for n in (world, 1))
    saved = sum(map(len, first.files.values()))
    assert saved <= 1.1 * full, f"{saved:,} bytes on the disk for {full:,} of tensors: save each number once"
    for rank, trace in enumerate(traces[1]):
        where = f"rank {rank} of {world}"
        for name, _, start, key, count, total in trace.values:
            true = want[key][name].flatten()[start : start + count].double()
            assert abs(total - true.sum()) <= 1e-5 * true.abs().sum(), (
                f"{where}: {f'{key} of ' if key else ''}{name}, from {start} on, sums up to {total:.7g}, expected "
                f"{float(true.sum()):.7g}"
            )
        what = f"{where}: all that was saved: put one tensor together, take your part, forget it;"
        never_holds(trace, traces[0][rank], what, full - part, part)


@exercise(CHECKPOINT, kind="property")
@pytest.mark.parametrize("late", [0, 1])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(run, rng, late):
    layout = draw_layout(rng, {"data": 2}, small=0)
    values, gradients = draw_values(rng, layout), [draw_values(rng, layout) for _ in range(2)]
    for rank, outcomes in enumerate(run(probes.killed, layout, values, gradients, late, world=2, folder={})):
        for saver, event, loaded in outcomes:
            assert loaded in ("old", "new"), (
                f"killed before rank {saver}'s '{event}' in the second save: on rank {rank} loading gave {loaded}"
            )
        for saver, event, loaded in outcomes:
            assert event not in ("return", "at the end") or loaded == "new", (
                f"after the second save has returned on rank {saver} ({event}), loading on rank {rank} gave {loaded}: "
                "nobody may go on before the index is there"
            )
