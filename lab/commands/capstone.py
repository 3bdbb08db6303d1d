"""`lab train`: trains the small model with your own stack, on ranks that it starts; `--compare` trains another, too.

The stack uses your solutions. If an exercise does not pass, a stand-in replaces it, and `lab train` names it. Once
mesh.compose passes, the stack is the last chapter's, on a mesh of data=2,tensor=2. Before that, it is the stack of
stages three to five on data=2: your attention, buckets, sharded optimizer and checkpoints. Training resumes from the
last checkpoint; --fresh starts anew.
"""

import argparse
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from ..course.assignment import ROOT, default
from ..harness.progress import load_progress
from ..plots.losses import save
from ..solution.unwritten import written
from ..train import loop as train
from ..train.stack import pieces
from .prose import say

MESHES = {"data": {"data": 2}, "mesh": {"data": 2, "tensor": 2}}
STAND_INS = "stand-ins"
GRACE_S = 5.0
BARS = " ▁▂▃▄▅▆▇█"


def main(arguments: Sequence[str], out: Console) -> int:
    """Return the exit code: 0, 2 for bad input, or the code of the rank that failed."""
    options = parse(arguments)
    runs = [options]
    if options.compare:
        runs = [_changed(options, fresh=True, folder=options.folder / "yours"), other(options)]
    reports, losses = {}, {}
    for run in runs:
        replace = lacking(run)
        name = STAND_INS if run.everything else run.impl
        say(out, description(run, replace), f"{name}: ", words={name: "bold"})
        if code := launch(run, replace):
            return code
        losses[name] = json.loads((run.folder / "losses.json").read_text())
        reports[name] = json.loads((run.folder / "run.json").read_text())
    out.print(table(losses, reports))
    for name, values in losses.items():
        out.print(f"loss of {name}: {values[0]:.3f} {sparks(values)} {values[-1]:.3f}", soft_wrap=True)
    picture = options.folder / "loss.png"
    if options.compare:
        picture = options.folder / "compare.png"
        save(picture, losses)
    out.print(f"plot: {picture}", soft_wrap=True)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse lab.train's options. The default stack and mesh depend on which exercises are solved."""
    parser = train.make_parser("lab train", __doc__ or "")
    parser.add_argument("--compare", metavar="IMPL", help="set another beside it: reference, a folder, or stand-ins")
    parser.set_defaults(stack=None, attention="own", everything=False)
    first, _ = parser.parse_known_args(arguments)
    if first.stack is None:
        mesh_only = {*first.mesh} - {"data"} or first.experts or first.fsdp or first.sequence or first.micro_batches > 1
        mesh_passes = solved(first.impl, "mesh.compose") and "mesh.compose" not in first.replace
        parser.set_defaults(stack="mesh" if mesh_passes or mesh_only else "data")
    options = train.parse(list(arguments), parser)
    if options.stack == "mesh" and not solved(options.impl, "mesh.compose"):
        parser.error(
            f"expected mesh.compose to pass for what was asked (--stack mesh, or an axis beyond data), it does not in "
            f"{options.impl}; lab train --mesh data=4 trains without it"
        )
    options.mesh = options.mesh or MESHES[options.stack]
    if options.compare not in (None, STAND_INS, "reference") and not train.folder_of(options.compare).is_dir():
        reference = "reference, " if (ROOT / "reference").is_dir() else ""
        parser.error(f"expected --compare {reference}a folder or {STAND_INS}, got {options.compare!r}")
    return options


def other(options: argparse.Namespace) -> argparse.Namespace:
    """Options of the run to compare with. If --compare names no folder, stand-ins replace all pieces of that run."""
    fresh = _changed(options, fresh=True, folder=options.folder / "other")
    if options.compare != STAND_INS and train.folder_of(options.compare).is_dir():
        return _changed(fresh, impl=options.compare, replace=[])
    mesh = {"data": math.prod(options.mesh.values())}
    plain = {"replace": [], "experts": 0, "fsdp": False, "sequence": False, "micro_batches": 1}
    return _changed(fresh, everything=True, stack="data", mesh=mesh, **plain)


def _changed(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **changes})


def solved(impl: str, id: str) -> bool:
    """Whether an exercise is solved: in student/, whether its last tests passed; elsewhere, whether it is written."""
    if impl == "student":
        return load_progress().passes(id)
    return written(train.folder_of(impl) / default().exercise(id).file)


def lacking(options: argparse.Namespace) -> list[str]:
    """The pieces of the stack that stand-ins must replace."""
    needed = pieces(options.stack, torch.device(train.device()))
    if options.everything:
        return needed
    return [id for id in needed if id in options.replace or not solved(options.impl, id)]


def description(options: argparse.Namespace, replace: list[str]) -> str:
    """Describe a run: the mesh, the implementation's own pieces, and the stand-ins."""
    mesh = ",".join(f"{axis}={n}" for axis, n in options.mesh.items())
    own_pieces = [id for id in pieces(options.stack, torch.device(train.device())) if id not in replace]
    text = f"{math.prod(options.mesh.values())} ranks, {mesh}; "
    if not replace:
        return f"{text}all {len(own_pieces)} pieces are its own"
    if not own_pieces:
        return f"{text}own: nothing yet; a stand-in trains for each of these until it passes: {', '.join(replace)}"
    return f"{text}own: {', '.join(own_pieces)}; stand-ins for: {', '.join(replace)}"


def launch(options: argparse.Namespace, replace: list[str]) -> int:
    """Run lab.train on ranks of this machine. End all ranks after a failure, and return the first nonzero exit code."""
    ranks = math.prod(options.mesh.values())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **shared}
    command = [sys.executable, "-m", "lab.train", *as_arguments(options, replace)]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}, process_group=0)
        for r in range(ranks)
    ]  # in their own process groups: on Ctrl-C, this process ends them
    try:
        deadline = math.inf  # after a failure, other ranks have GRACE_S to report the cause
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if any(p.poll() for p in processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
    except KeyboardInterrupt:
        train.complain("stopped; the same command goes on from the last checkpoint")
        return 130
    finally:
        for p in processes:
            with contextlib.suppress(ProcessLookupError):
                p.terminate()
        codes = [p.wait() for p in processes]
    return next((c for c in codes if c > 0), next((1 for c in codes if c), 0))


def as_arguments(options: argparse.Namespace, replace: list[str]) -> list[str]:
    """The options as command-line arguments of lab.train."""
    words = ["--mesh", ",".join(f"{axis}={n}" for axis, n in options.mesh.items()), "--replace", ",".join(replace)]
    for name, value in vars(options).items():
        if name in ("mesh", "replace", "compare", "everything") or value is False:
            continue
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def table(losses: dict[str, list[float]], reports: dict[str, dict[str, float]]) -> Table:
    """The results, one row per run."""
    columns = (
        Column(title, justify="right") for title in ("last loss", "tokens/s", "MFU", "state a rank", "peak memory")
    )
    grid = Table("", *columns, box=None, header_style="bold")
    for name, row in reports.items():
        grid.add_row(
            name, f"{losses[name][-1]:.4f}", *(
                format(row[what], style) if math.isfinite(row[what]) else "–"  # no step was needed, so none was timed
                for what, style in (("tokens_per_s", ",.0f"), ("mfu", ".1%"))
            ),
            f"{row['state_bytes'] / 2**20:.2f} MiB", f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        )  # fmt: skip
    return grid


def sparks(values: Sequence[float], width: int = 48) -> str:
    """A curve in one line of block characters, scaled from its least value to its largest."""
    samples = [values[i * len(values) // width] for i in range(width)] if len(values) > width else [*values]
    low, high = min(samples), max(samples)
    return "".join(BARS[1 + round((len(BARS) - 2) * (value - low) / ((high - low) or 1))] for value in samples)
