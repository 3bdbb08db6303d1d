"""`lab dryrun`: runs a training step on a simulated cluster, and shows what each rank sends, computes and holds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from .. import standins
from ..course.assignment import ROOT, AssignmentError, default
from ..solution.impl import folder_of
from ..solution.unwritten import written
from .prose import say

if TYPE_CHECKING:
    from ..cluster.hardware import Cluster
    from ..cluster.simulator import SimulationResult
    from ..dryrun.accounts import Account, Step
    from ..harness.runner import Runner

COMPOSE = "mesh.compose"  # the exercise that builds a step on a mesh
NEED_NUMBERS = ("mesh.route", "mesh.dispatch")  # their stand-ins need data, and a dry run has none
PATIENCE_S = 600.0  # time limit for one rank
SUFFIXES = (".png", ".pdf", ".svg")
COLUMNS = 4  # ranks in one table: a terminal has 80 characters
WIDTH = 72  # of a timeline, in characters
MARKS = {"forward": ("█", "blue"), "backward": ("▓", "dark_orange"), "step": ("▒", "green"), "": ("·", "dim")}
out = Console(highlight=False)


def dryrun(
    mesh: Annotated[
        str, typer.Option(help="data=16,pipe=8,expert=1,tensor=8; an axis left out is 1.")
    ] = "data=2,tensor=2",
    impl: Annotated[str, typer.Option(help="student, reference or a folder.")] = "student",
    model: Annotated[str, typer.Option(help="By name: tiny, small, 2.7b, 7b, 8b, 70b, 405b, ….")] = "tiny",
    cluster: Annotated[str, typer.Option(help="By name, as in lab/cluster/hardware.toml.")] = "dgx-h100",
    micro_batches: Annotated[int, typer.Option(min=1)] = 1,
    sequences: Annotated[int, typer.Option(min=0, help="In the whole batch; 0: one a micro-batch.")] = 0,
    context: Annotated[int, typer.Option(min=0, help="Tokens in a sequence; 0: as many as the model can.")] = 0,
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b or interleaved.")] = "1f1b",
    chunks: Annotated[int, typer.Option(min=1, help="Of the model on each pipeline rank, if interleaved.")] = 1,
    sequence: Annotated[bool, typer.Option("--sequence", help="Sequence parallelism along tensor.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard along data.")] = False,
    experts: Annotated[int, typer.Option(min=0, help="In each block; 0: dense.")] = 0,
    k: Annotated[int, typer.Option(min=1, help="Experts for each token.")] = 2,
    layers: Annotated[int, typer.Option(min=0, help="Fewer or more of them than the model has.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="Run this one, and those before and behind it along pipe.")] = 0,
    picture: Annotated[Path, typer.Option(help="Where the timeline is drawn.")] = ROOT / ".cache" / "dryrun.png",
) -> None:
    """A training step as ranks of any mesh, in one process and without data: bytes, FLOPs, memory and a timeline.

    lab dryrun --impl reference --mesh data=16,pipe=8,tensor=8 --model 70b --micro-batches 32 --context 4096 --sequence
    """
    from ..cluster.hardware import cluster as find_cluster
    from ..cluster.simulator import SimulationError, play
    from ..dryrun.accounts import Step
    from ..dryrun.matching import matched
    from ..harness.runner import Executor, Runner
    from ..train.loop import degrees

    folder = folder_of(impl)
    if not folder.is_dir():
        raise AssignmentError(f"dryrun: expected --impl student, reference or a folder, got {impl!r}")
    try:
        config = _model(model, layers)
        step = Step(
            config, degrees(mesh), sequences, context, micro_batches, schedule, chunks, sequence, fsdp, experts, k
        )  # fmt: skip
        if rank >= step.world:
            raise ValueError(f"rank: expected 0 to {step.world - 1}, the mesh's, got {rank}")
        hardware = find_cluster(cluster, step.world)
        _drawable(picture)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise AssignmentError(f"dryrun: {error}") from None
    replace = stand_ins(folder, step)
    if replace:
        say(out, f"not written yet, so a stand-in takes its place: {', '.join(replace)}", style="yellow")
    runner = Runner(Executor(folder))
    try:
        accounts = [_account(runner, step, each, replace) for each in step.stages(rank)]
        neighbours = {axis: _account(runner, step, each, replace) for axis, each in step.neighbours(rank).items()}
    finally:
        runner.close()
    batch = f"{step.sequences:,} sequences of {step.context:,} tokens"
    say(out, f"{model} on {_mesh(step)}, {step.world:,} ranks: {batch}")
    for first in range(0, len(accounts), COLUMNS):
        out.print(table(accounts[first : first + COLUMNS], step))
    wrong = matched([*accounts, *neighbours.values()])
    if wrong:
        say(out, wrong, style="red")
        sys.exit(1)
    if neighbours:
        compared = ", ".join(f"rank {account.rank} along {axis}" for axis, account in neighbours.items())
        say(out, f"compared with a neighbour along each axis: {compared}; other ranks are not run")
    say(out, fits(accounts, hardware))
    try:
        result = play({account.rank: account.program(step) for account in accounts}, hardware, timeline=True)
    except SimulationError as error:
        say(out, str(error), style="red")
        sys.exit(1)
    say(out, _step_time(result, accounts, hardware))
    for line in timeline_rows(result):
        out.print(line)
    draw(result, f"{model} on {_mesh(step)}", picture)
    say(out, f"drawn in {picture}")


def stand_ins(folder: Path, step: Step) -> dict[str, str]:
    """{exercise: its stand-in} for exercises that a step needs and that are not written.

    Raises AssignmentError if mesh.compose is not written (it has no stand-in), or with experts, one of NEED_NUMBERS.
    """
    solution = "; --impl reference runs the solution" if (ROOT / "reference").is_dir() else ""

    def lacks(id: str) -> bool:
        return not written(folder / default().exercise(id).file)

    if lacks(COMPOSE):
        raise AssignmentError(f"dryrun: {COMPOSE} is not written yet, and a step needs it{solution}")
    if step.experts and (stubs := [id for id in NEED_NUMBERS if lacks(id)]):
        raise AssignmentError(
            f"dryrun: expected {' and '.join(stubs)} to be written for --experts: a stand-in needs numbers, and a dry "
            f"run has none; without --experts it runs{solution}"
        )
    return {id: standins.source(id) for id in default().exercise(COMPOSE).needs if lacks(id)}


def _model(name: str, layers: int) -> Any:
    from ..model.transformer import MODELS

    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return replace(MODELS[name], layers=layers) if layers else MODELS[name]


def _drawable(picture: Path) -> None:
    """Raises ValueError if the picture cannot be written."""
    if picture.suffix not in SUFFIXES:
        raise ValueError(f"picture: expected a name that ends in {', '.join(SUFFIXES)}, got {picture}")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"picture: expected a folder that can be written, got {picture.parent}: {error.strerror}"
        ) from None


def _account(runner: Runner, step: Step, rank: int, replace: dict[str, str]) -> Account:
    from ..dryrun.accounts import Account
    from ..dryrun.rank import dry
    from ..harness.runner import ProbeFailed

    objects = {default().exercise(id).object: source for id, source in replace.items()}
    try:
        return Account(**json.loads(runner.run(dry, step.plain(), rank, timeout=PATIENCE_S, replace=objects)))
    except ProbeFailed as error:
        if error.reason == "unwritten":
            name = error.text.partition(":")[0]
            raise AssignmentError(f"dryrun: {name} is not written yet, and a step needs it") from None
        where = f" ({error.where})" if error.where else ""
        raise AssignmentError(f"dryrun: rank {rank}: {' '.join(error.text.split())}{where}") from None


def _mesh(step: Step) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in step.mesh.items() if n > 1) or "one rank"


def table(accounts: Sequence[Account], step: Step) -> Table:
    """A column per rank: FLOPs, bytes sent by axis, and peak memory by kind; GB are 10⁹ bytes."""
    sent = [account.sent(step) for account in accounts]
    rows = {
        "parameters, millions": [_short(account.parameters / 1e6) for account in accounts],
        "TFLOP": [_short(account.flops / 1e12) for account in accounts],
        **{
            f"sent along {axis}, GB": [_short(row.get(axis, 0) / 1e9) for row in sent]
            for axis in dict.fromkeys(axis for row in sent for axis in row)
        },
        "held at rest, GB": [_short(sum(account.resting.values()) / 1e9) for account in accounts],
        "held at most, GB": [_short(sum(account.peak.values()) / 1e9) for account in accounts],
        **{f"  {kind}": [_short(account.peak[kind] / 1e9) for account in accounts] for kind in accounts[0].peak},
    }
    columns = (Column(f"rank {account.rank}", justify="right") for account in accounts)
    grid = Table("", *columns, box=None, header_style="bold")
    for name, cells in rows.items():
        grid.add_row(name, *cells)
    return grid


def fits(accounts: Sequence[Account], cluster: Cluster) -> str:
    """Return a sentence: whether the ranks' memory suffices, and if not, which kind of tensor uses most of it."""
    from ..cluster.steps import RESERVED

    worst = max(accounts, key=lambda account: sum(account.peak.values()))
    peak, name, hbm = sum(worst.peak.values()), cluster.device.name, cluster.device.hbm_bytes
    if peak <= (1 - RESERVED) * hbm:
        return f"fits: rank {worst.rank} holds {_short(peak / 1e9)} GB at most, {100 * peak / hbm:.0f} % of an {name}"
    kind = max(worst.peak, key=lambda kind: worst.peak[kind])
    transient = kind in ("activations", "buffers")
    advice = "--sequence, shorter sequences or more tensor" if transient else "--fsdp, more pipe or tensor"
    return (
        f"does not fit: rank {worst.rank} would hold {_short(peak / 1e9)} GB at most, an {name} has {hbm / 1e9:g}, of "
        f"which {100 * RESERVED:.0f} % are set aside; "
        f"{_short(worst.peak[kind] / 1e9)} GB are {kind}: {advice} would make them less"
    )


def _step_time(result: SimulationResult, accounts: Sequence[Account], cluster: Cluster) -> str:
    shares = sorted(result.causes.items(), key=lambda item: -item[1])
    causes = ", ".join(f"{name} {100 * seconds / result.step_s:.0f} %" for name, seconds in shares if seconds)
    flops = sum(account.flops for account in accounts) / len(accounts)
    return (
        f"{_short(result.step_s)} s a step on {cluster.device.name}, {flops / result.step_s / 1e12:.0f} TFLOP/s a rank "
        f"(numbers of 4 bytes; products as fast as those of 2): {causes}"
    )


def timeline_rows(result: SimulationResult) -> list[str]:
    """A line per rank: for each of WIDTH parts of the step, the activity that took most of the time."""
    cell_s = result.step_s / WIDTH
    lines = []
    for rank, bars in result.timeline.items():
        seconds: list[dict[str, float]] = [dict.fromkeys(MARKS, 0.0) for _ in range(WIDTH)]
        for bar in bars:
            if bar.kind in MARKS:
                for i in range(int(bar.start_s / cell_s), min(WIDTH - 1, int(bar.end_s / cell_s)) + 1):
                    seconds[i][bar.kind] += max(0.0, min(bar.end_s, (i + 1) * cell_s) - max(bar.start_s, i * cell_s))
        for spent in seconds:
            spent[""] = cell_s - sum(spent.values())
        marks = [MARKS[max(spent, key=spent.__getitem__)] for spent in seconds]
        lines.append(f"{rank:>6} " + "".join(f"[{colour}]{mark}[/{colour}]" for mark, colour in marks))
    legend = "  ".join(f"{mark} {kind or 'waits, or talks'}" for kind, (mark, _) in MARKS.items())
    return [*lines, f"       {legend}"]


def draw(result: SimulationResult, title: str, path: Path) -> None:
    """Draw the timeline to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from ..plots.timeline import timelines

    figure = timelines({title: [*result.timeline.values()]}, unit_s=1.0 if result.step_s > 1 else 1e-3)
    figure.axes[0].set_yticks(range(len(result.timeline)), [f"rank {rank}" for rank in result.timeline])
    figure.savefig(path)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
