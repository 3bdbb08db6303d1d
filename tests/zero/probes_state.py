"""Probes of checkpoints: save, interrupt, and continue."""

import contextlib
import functools
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.raising import raised
from lab.measure import clock
from lab.ranks import child, gates

from .probes_optimizer import optimizer

OPTIONS = {"lr": 0.1}  # for tests that need no special options


class Model(nn.Module):
    """A few layers, the last tied to the first; a frozen parameter; a buffer that changes, one that is not saved."""

    def __init__(self, width: int, depth: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.layers.append(nn.Linear(width, width))
        self.layers[-1].weight = self.layers[0].weight
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.frozen + 0.01 * self.seen


def start(impl, width: int, name: str, options: dict, group, state: dict | None = None, kind: str = "zero1"):
    """Return a model, an optimizer with two groups, and a scheduler. Weights are random, or those of `state`."""
    m = Model(width)
    if state is not None:
        m.load_state_dict(state)
    o = optimizer(impl, kind, groups_of(m, options), name, options, group)
    return m, o, torch.optim.lr_scheduler.ExponentialLR(o, 0.8)


def groups_of(m: nn.Module, options: dict) -> list[dict]:
    """Return two parameter groups: matrices, and all other tensors with half the learning rate."""
    matrices = [p for p in m.parameters() if p.ndim == 2]
    others = [p for p in m.parameters() if p.ndim != 2]
    return [{"params": matrices}, {"params": others, "lr": options["lr"] / 2}]


def steps(m, o, scheduler, batches: list) -> list[float]:
    """Train on these batches, whole on every rank; return the losses."""
    losses = []
    for x in batches:
        o.zero_grad()
        loss = (m(x) ** 2).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        o.step()
        scheduler.step()
    return losses


def uninterrupted(impl, kind: str, width: int, name: str, options: dict, state: dict, batches: list) -> dict:
    """Train without interruption, with torch's optimizer ("plain") or one sharded over all ranks."""
    m, o, scheduler = start(impl, width, name, options, None, state, kind)
    return {"losses": [steps(m, o, scheduler, stage) for stage in batches], "state": dict(nn.Module.state_dict(m))}


def checkpoint(impl, folder, group):
    return impl.zero.state_dict.Checkpoint(folder, group=group)


def shared_folder() -> Path:
    """Return a path in the folder that all ranks share; it exists only in probes run with folder={}."""
    return Path(child.shared) / "checkpoint"


def resume(impl, width, name, options, state, batches: list, stages: list) -> dict:
    """Train in stages; each stage loads the checkpoint of the stage before. stages: [[ranks, gathered], …].

    Returns the "state" at the end, and a record per stage of this rank, "stages".
    """
    folder = shared_folder()
    groups = [dist.new_group(ranks) for ranks, _ in stages]
    record: dict = {"stages": [], "state": {}}
    for number, ((ranks, gathered), group) in enumerate(zip(stages, groups, strict=True)):
        dist.barrier()
        torch.manual_seed(100 * number + dist.get_rank())  # so that state that is not loaded differs
        stage: dict = {"losses": [], "extra": None}
        if dist.get_rank() in ranks:
            m, o, scheduler = start(impl, width, name, options, group, None if number else state)
            ckpt = checkpoint(impl, folder, group)
            if number:
                extra = _load(ckpt, m, o, f"on {len(ranks)} ranks, of what {len(stages[number - 1][0])} have saved")
                stage |= {"loaded": everything(m, o), "extra": extra["note"]}
                scheduler.load_state_dict(extra["scheduler"])
            stage["losses"] = steps(m, o, scheduler, batches[number])
            gates.mark(f"save {number}")
            with record_flushes() as flushed:
                ckpt.save(m, o, gathered=gathered, extra={"scheduler": scheduler.state_dict(), "note": [number, "é"]})
            gates.mark(f"save {number} is done")
            stage |= {"files": listing(folder), "saved": everything(m, o), "flushed": flushed_files(flushed, folder)}
            record["state"] = dict(nn.Module.state_dict(m))
        record["stages"].append(stage)
    return record


@contextlib.contextmanager
def record_flushes() -> Iterator[dict]:
    """Yield a dict that records the bytes of each file that this process flushes, by inode; key None: all files."""
    found: dict = {}

    def flush(plain: Callable, *file) -> None:
        for f in file:
            descriptor = f if isinstance(f, int) else f.fileno()
            inode = os.fstat(descriptor).st_ino
            found[inode] = None  # a folder, or a system without /proc
            with contextlib.suppress(OSError):
                found[inode] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        if not file:
            found[None] = None
        plain(*file)

    with contextlib.ExitStack() as patches:
        for name in {"fsync", "fdatasync", "sync"} & {*vars(os)}:
            patches.enter_context(mock.patch.object(os, name, functools.partial(flush, getattr(os, name))))
        yield found


def flushed_files(flushed: dict, folder: Path) -> list[str]:
    """Return the files that did not change after they were flushed."""
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # another rank may have removed it just now
            if None in flushed or flushed.get(path.stat().st_ino, b"never") in (path.read_bytes(), None):
                found.append(str(path.relative_to(folder)))
    return found


def _load(ckpt, m, o, where: str):
    """Call load(); if it raises, add `where` to the error."""
    try:
        return ckpt.load(m, o)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise ValueError(f"load() {where}: {error}").with_traceback(error.__traceback__) from None


def listing(folder: Path) -> list:
    """Return [name, bytes, type] per file. type: "json", "safetensors" or "other", judged by content."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data, kind = path.read_bytes(), "other"
        with contextlib.suppress(ValueError):
            length = int.from_bytes(data[:8], "little")
            binary = len(data) > 8 and length <= len(data)
            json.loads(data[8 : 8 + length] if binary else data)
            kind = "safetensors" if binary else "json"
        found.append([path.name, len(data), kind])
    return found


WRITING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


def killed(impl, width, state, batches, gathered: bool, slow_rank: int) -> dict:
    """Return as "told" what a load gives if all ranks are killed at some moment of the second save: per moment, [event,
    version, folder bytes after one rank has loaded and saved again]; as "whole" the bytes of one checkpoint.

    version: "old", "new", or what is wrong, judged by weights, buffers, this rank's part of the moments, learning rates
    and `extra`. Rank `slow_rank` starts its save late.
    """
    single = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    folder, m, o, ckpt, old = saved_once(impl, width, state, batches, gathered)
    dist.barrier()
    with copy_on_change(folder, slow_rank) as copies:
        ckpt.save(m, o, gathered=gathered, extra="new")
    dist.barrier()
    events, new = [], everything(m, o)
    for event, copy in copies:
        if copy is not None:
            loaded = loaded_version(impl, width, single, copy, old, new)
            events.append([event, loaded, resumed_bytes(impl, width, single, copy) if loaded in ("old", "new") else 0])
    folder_bytes = sum(size for _, size, _ in listing(folder))
    events.append(["at the end", loaded_version(impl, width, single, folder, old, new), folder_bytes])
    dist.barrier()
    return {"told": events, "whole": folder_bytes}


def resumed_bytes(impl, width, group, folder: Path) -> int:
    """Load the folder in a new run and save again; return the bytes of the folder."""
    m, o, _ = start(impl, width, "AdamW", OPTIONS, group)
    ckpt = checkpoint(impl, folder, group)
    ckpt.load(m, o)
    ckpt.save(m, o)
    return sum(size for _, size, _ in listing(folder))


def saved_once(impl, width, state, batches, gathered: bool) -> tuple:
    """Train, save with extra="old", train again; return (folder, model, optimizer, checkpoint, saved state)."""
    folder = shared_folder()
    m, o, scheduler = start(impl, width, "AdamW", OPTIONS, None, state)
    ckpt = checkpoint(impl, folder, None)
    steps(m, o, scheduler, batches[0])
    ckpt.save(m, o, gathered=gathered, extra="old")
    old = everything(m, o)
    steps(m, o, scheduler, batches[1])
    return folder, m, o, ckpt, old


@contextlib.contextmanager
def copy_on_change(folder: Path, slow_rank: int) -> Iterator[list]:
    """Yield a list that gets, before each file operation of this rank, (event, copy of the folder). The copy is None if
    other ranks kept changing the folder. Rank `slow_rank` starts late.

    Hard links to the old files reveal each file that is overwritten in place. For each such file, the list also gets
    the old folder with this file half written."""
    copies: list = []
    watching = [True]
    links, old = Path(tempfile.mkdtemp(prefix="links", dir=folder.parent)), {}
    for path in (p for p in folder.rglob("*") if p.is_file()):
        old[path.relative_to(folder)] = path.read_bytes()
        os.link(path, links / str(len(old) - 1))
    dist.barrier()

    def watch(event: str, args: tuple) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & 3
        if not watching[0] or not (opened or event in WRITING) or not str(args[0]).startswith(str(folder)):
            return
        watching[0] = False
        if dist.get_rank() == slow_rank and not copies:
            clock.sleep(0.15)
        path = Path(str(args[0]))
        copies.append((f"{event} {path.name}", snapshot(folder, len(copies))))
        if opened and args[2] & os.O_TRUNC and (copy := snapshot(folder, len(copies))) is not None:
            (copy / path.relative_to(folder)).write_bytes(b"")  # opened, but nothing written yet
            copies.append((f"write to {path.name}", copy))
        watching[0] = True

    sys.addaudithook(watch)
    yield copies
    watching[0] = False
    for number, (name, data) in enumerate(old.items()):
        if (now := (links / str(number)).read_bytes()) != data:
            copy = folder.parent / f"torn-{dist.get_rank()}-{number}"
            for other, content in {**old, name: now[: len(now) // 2] + data[len(now) // 2 :]}.items():
                (copy / other).parent.mkdir(parents=True, exist_ok=True)
                (copy / other).write_bytes(content)
            copies.append((f"end of writing into {name.name}, which the checkpoint before it needs", copy))


def snapshot(folder: Path, number: int) -> Path | None:
    """Return a consistent copy of the folder, or None if the folder kept changing."""
    copy = folder.parent / f"copy-{dist.get_rank()}-{number}"
    for _ in range(20):
        shutil.rmtree(copy, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            before = stamps(folder)
            shutil.copytree(folder, copy)
            if stamps(folder) == before:
                return copy
        clock.sleep(0.01)
    return None


def stamps(folder: Path) -> list:
    paths = sorted([folder, *folder.rglob("*")])
    return [(str(p), p.stat().st_mtime_ns, p.stat().st_size if p.is_file() else 0) for p in paths]


def everything(m, o) -> dict[str, torch.Tensor]:
    """Return what a checkpoint must restore: weights, buffers, this rank's optimizer state, learning rates."""
    names = {p: name for name, p in m.named_parameters()}
    state = {f"{k} of {names[p]}": v for p, entries in o.state.items() for k, v in entries.items() if v is not None}
    rates = {f"rate {i}": g["lr"] for i, g in enumerate(o.param_groups)}
    return {n: torch.as_tensor(v).detach().clone() for n, v in {**m.state_dict(), **state, **rates}.items()}


def loaded_version(impl, width, group, folder: Path, old: dict, new: dict) -> str:
    """Load the folder; return "old", "new", or a text about the error or about what was loaded instead."""
    m, o, _ = start(impl, width, "AdamW", OPTIONS, group)
    try:
        extra = checkpoint(impl, folder, group).load(m, o)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    got, differing = everything(m, o), {}
    for name, state in (("old", old), ("new", new)):
        differing[name] = [n for n, t in state.items() if n not in got or not torch.equal(t, got[n])]
        if not differing[name] and extra == name:
            return name
    return f"a mixture: extra is {extra!r}; not old: {differing['old'][:2]}; not new: {differing['new'][:2]}"


def full_disk(impl, width, state, batches, gathered: bool) -> dict:
    """Save with limits on the size of a file, then without. "told": [limit, whether it raised, version] per limit."""
    folder, m, o, ckpt, old = saved_once(impl, width, state, batches, gathered)
    sizes = [size for _, size, _ in listing(folder)]
    largest, new = max(sizes), everything(m, o)
    outcomes = []
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 64, largest // 3, largest - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            outcome = raised(lambda: ckpt.save(m, o, gathered=gathered, extra="new"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        outcomes.append([limit, outcome != "nothing", loaded_version(impl, width, None, folder, old, new)])
    ckpt.save(m, o, gathered=gathered, extra="new")
    last = loaded_version(impl, width, None, folder, old, new)
    after = sum(size for _, size, _ in listing(folder))
    return {"told": outcomes, "last": last, "whole": sum(sizes), "after": after, "largest": largest}


def refusals(impl, width) -> dict[str, list]:
    """Return [error, whether model and optimizer are unchanged] per load() of what is missing or does not fit."""
    m, o, scheduler = start(impl, width, "AdamW", OPTIONS, None)
    ckpt = checkpoint(impl, shared_folder(), None)
    steps(m, o, scheduler, [torch.ones(2, width)])  # creates moments, and changes the learning rate
    results = {"nothing saved": refused(ckpt, m, o)}
    ckpt.save(m, o)
    first, last, resized, extra = (Model(width) for _ in range(4))
    first.frozen = nn.Parameter(torch.randn(width + 1), requires_grad=False)
    last.layers[-1].bias = nn.Parameter(torch.randn(width + 1))
    resized.seen = torch.zeros(1, dtype=torch.int64)
    extra.register_buffer("more", torch.zeros(2))
    others = {
        "another model": Model(width, depth=2),
        "another width": Model(width + 1),
        "another shape, of the first tensor": first,
        "another shape, of the last tensor": last,
        "another shape, of a buffer": resized,
        "another buffer": extra,
    }
    for name, other in others.items():
        results[name] = refused(ckpt, other, optimizer(impl, "zero1", groups_of(other, OPTIONS), "AdamW", OPTIONS))
    with torch.no_grad():
        m.frozen += 1  # else loading would change nothing
    return {**results, "other groups": refused(ckpt, m, optimizer(impl, "zero1", m.parameters(), "AdamW", OPTIONS))}


def refused(ckpt, m, o) -> list:
    before = everything(m, o)
    error, after = raised(lambda: ckpt.load(m, o)), everything(m, o)
    return [error, after.keys() == before.keys() and all(torch.equal(t, before[n]) for n, t in after.items())]
