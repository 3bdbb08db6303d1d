"""Checkpoints of a sharded training state.

Must hold: training that is saved on 2 ranks, then continued on 4 and on 3, has bit for bit the losses of an
uninterrupted training, with sharded and gathered checkpoints. If ranks are killed while saving, the previous checkpoint
remains. Files are safetensors and JSON. Typical fakes: all ranks write everything (caught by bytes per file and bytes
sent); moments that start anew (caught by losses, with a scheduler and groups); each rank loads its own state_dict (the
number of ranks changes); take the newest file for the newest complete checkpoint (the folder is copied before each file
operation of each rank, also with one slow rank, and each copy must load; and the disk is full in the middle of a file).
"""

from pathlib import Path

import pytest
import torch

from lab.harness import gated
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_state as probes
from .oracles import OPTIONS

STATE_DICT = "zero.state_dict"


def draw(rng, counts, width=0) -> tuple:
    width = width or rng.integers(4, 8)
    state = gated.draw_state(rng, probes.Model(width), 0.5, 9)
    return width, state, [[rng.normal(3, width) for _ in range(n)] for n in counts]


@exercise(STATE_DICT, kind="numerics")
@pytest.mark.parametrize(("name", "gathered"), [("AdamW", False), ("AdamW", True), ("SGD", True), ("NAdam", False)])
def test_2_ranks_then_4_then_3_go_on_as_one_did(run, rng, name, gathered):
    width, state, batches = draw(rng, [rng.integers(1, 3) for _ in range(3)])
    stages = [[sorted(rng.shuffled(range(4))[:2]), gathered], [[0, 1, 2, 3], gathered],
              [sorted(rng.shuffled(range(4))[:3]), not gathered]]  # fmt: skip
    want = run(probes.uninterrupted, "plain", width, name, OPTIONS[name], state, batches)
    args = width, name, OPTIONS[name], state, batches, stages
    results = run(probes.resume, *args, world=4, folder={})
    for rank, got in enumerate(results):
        for number, (ranks, _) in enumerate(stages):
            if rank not in ranks:
                continue
            what = f"rank {rank}, {name}, on ranks {ranks} after {[r for r, _ in stages[:number]]}"
            stage = got["stages"][number]
            assert stage["losses"] == want["losses"][number], (
                f"{what}: losses {stage['losses']}, without interruption {want['losses'][number]}: "
                f"{not_as_saved(results, stages, rank, number)}"
            )
            note = [number - 1, "é"] if number else None
            assert stage["extra"] == note, f"{what}: extra came back as {stage['extra']}, was {note}"
        for key, tensor in want["state"].items() if rank in stages[-1][0] else ():
            assert torch.equal(got["state"][key], tensor), (
                f"rank {rank}: {key} differs at the end: {not_as_saved(results, stages, rank, len(stages) - 1)}"
            )


def not_as_saved(results, stages, rank, number) -> str:
    """Describe the state that load() restored differently from what the stage before had saved."""
    if not number:
        return "this is before anything was saved"
    saved = {name: t for r in stages[number - 1][0] for name, t in results[r]["stages"][number - 1]["saved"].items()}
    loaded = {name for r in stages[number][0] for name in results[r]["stages"][number]["loaded"]}
    differences: dict[str, list[str]] = {}
    for name, t in results[rank]["stages"][number]["loaded"].items():
        if name in saved and not torch.equal(t, saved[name]):
            kind = {"rate": "hyperparameters", "seen": "buffers"}.get(name.split()[0], "parameters")
            change = f" ({float(t):.4g}, saved {float(saved[name]):.4g})" if t.ndim == 0 else ""
            if kind == "hyperparameters" and name != "rate 0" and torch.equal(t, saved["rate 0"]):
                change += ", which group 0 was saved with"
            differences.setdefault("the optimizer's state" if " of " in name else kind, []).append(name + change)
    if lost := sorted(saved.keys() - loaded):
        differences[f"no rank has them, {len(lost)} of {len(saved)} that were saved"] = lost
    lines = [f"{', '.join(names[:3])}{', …' * (len(names) > 3)} ({what})" for what, names in differences.items()]
    if not lines:
        return "all is as it was saved when load() returns: does it stay so in the next steps?"
    return "what has not come back when load() returns: " + "; ".join(lines)


REFUSED = {  # what is refused: the advice
    "nothing saved": "say that there is no index",
    "another model": "compare the names of tensors with those that were saved",
    "another width": "compare the shapes of tensors with those that were saved",
    "another shape, of the first tensor": "compare all shapes before anything is overwritten",
    "another shape, of the last tensor": "compare all shapes before anything is overwritten",
    "another shape, of a buffer": "compare the shapes of buffers, too",
    "another buffer": "compare the names of buffers, too",
    "other groups": "compare which parameters each group has",
}


@exercise(STATE_DICT, kind="numerics")
def test_what_does_not_fit_is_refused(run, rng):
    (got,) = run(probes.refusals, rng.integers(3, 6), world=1, folder={})
    for case, why in REFUSED.items():
        error, unchanged = got[case]
        want = "FileNotFoundError" if case == "nothing saved" else "ValueError"
        assert error == want, f"{case}: load raised {error}, expected {want}: {why}"
        assert unchanged, f"{case}: load raised {error}, but had changed the model or the optimizer: {why}"


@exercise(STATE_DICT, kind="property")
def test_files_are_shares_in_safetensors_and_json(run, rng):
    world = 3
    width, state, _ = draw(rng, [], 24)
    batches = [[rng.normal(3, width) for _ in range(2)] for _ in range(2)]
    stages = [[[0, 1, 2], False], [[0, 1, 2], True]]
    args = width, "AdamW", OPTIONS["AdamW"], state, batches, stages
    traces = run.trace(probes.resume, *args, world=world, folder={})
    want = run(probes.uninterrupted, "plain", *args[:-1])
    for rank, trace in enumerate(traces):
        losses = [stage["losses"] for stage in trace.values["stages"]]
        assert losses == want["losses"], f"rank {rank}: losses {losses}, without interruption {want['losses']}"
    sharded, gathered = zip(*(trace.values["stages"] for trace in traces), strict=True)
    for ranks, what in ((sharded, "sharded"), (gathered, "gathered")):
        files = ranks[0]["files"]
        other = [name for name, _, kind in files if kind == "other"]
        assert not other, f"{what}: {other} is neither JSON nor safetensors: a pickle can run code when it is loaded"
        lost = sorted({name for name, *_ in files} - {Path(n).name for got in ranks for n in got["flushed"]})
        assert not lost, f"{what}: {lost} may not be on the disk when power fails: os.fsync each file once it is whole"
        data = [size for _, size, kind in files if kind == "safetensors"]
        count = 1 if what == "gathered" else world
        assert len(data) == count, (
            f"{what}: {len(data)} safetensors files ({files}), expected {count}, older ones removed"
        )
    shares = [s for _, s, k in sharded[0]["files"] if k == "safetensors"]
    full = sum(s for _, s, k in gathered[0]["files"] if k == "safetensors")
    measured("bytes of all shares on disk", sum(shares), 1.2 * full, "bytes", at_most=True)
    assert sum(shares) <= 1.2 * full, (
        f"shares of {shares} bytes for {full}: each tensor is saved once, also a parameter, which all ranks have"
    )
    assert max(shares) <= 0.6 * full, f"shares of {shares} bytes for {full}: each rank writes what it has"
    json_bytes = sum(s for _, s, k in sharded[0]["files"] if k == "json")
    assert json_bytes <= full / 2, f"{json_bytes} bytes of JSON for {full} of tensors: tensors go into safetensors"
    for rank, trace in enumerate(traces):
        saving = trace.cut([name for stage in range(2) for name in (f"save {stage}", f"save {stage} is done")])[0]
        sent = sum(row["bytes"] for row in saving if row["op"] not in ("recv", "barrier"))
        assert sent <= 4096, f"rank {rank}: a sharded save sent {sent:,} bytes; tensors are written by who has them"


@exercise(STATE_DICT, kind="property")
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(run, rng, gathered, late):
    width, state, batches = draw(rng, [1, 1])
    for rank, got in enumerate(run(probes.killed, width, state, batches, gathered, late, world=2, folder={})):
        for event, loaded, size in got["told"]:
            assert loaded in ("old", "new"), (
                f"killed before rank {rank}'s '{event}' in the second save: loading gave {loaded}"
            )
            assert size <= 1.3 * got["whole"], (
                f"killed before rank {rank}'s '{event}' in the second save, loaded and saved by one rank: the folder "
                f"has {size:,} bytes, one checkpoint {got['whole']:,}: remove the files of the save that failed, too"
            )
        assert got["told"][-1][1] == "new", f"rank {rank}: after the second save loading gave {got['told'][-1][1]}"


@exercise(STATE_DICT, kind="property")
@pytest.mark.parametrize("gathered", [False, True])
def test_full_disk_keeps_the_previous_checkpoint(run, rng, gathered):
    width, state, batches = draw(rng, [1, 1])
    (got,) = run(probes.full_disk, width, state, batches, gathered, world=1, folder={})
    for limit, failed, loaded in got["told"]:
        want = ("old",) if failed else ("old", "new")
        assert loaded in want, (
            f"a save that could write {limit} bytes of a file of {got['largest']} "
            f"{'raised' if failed else 'returned'}, and loading gave {loaded}, expected {' or '.join(want)}"
        )
        assert failed, f"a save that could write only {limit} bytes of a file of {got['largest']} raised nothing"
    assert got["last"] == "new", f"once there was room, save and load gave {got['last']}"
    assert got["after"] <= 1.3 * got["whole"], (
        f"after failed saves and a good one the folder has {got['after']:,} bytes, one checkpoint {got['whole']:,}: "
        "remove what no checkpoint needs"
    )
