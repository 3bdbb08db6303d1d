"""Trains the small model on a mesh: `torchrun --nproc-per-node 4 -m lab.train --mesh data=2,tensor=2`.

It uses an implementation's own stack (`lab.train.stack`), and trains on the text of the handout. `lab train` starts the
ranks itself. A run that was stopped, or that torchrun restarts after the loss of a rank (`--max-restarts`), resumes
from its last checkpoint, on the same mesh or another.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

from ..course.assignment import ROOT, default
from ..measure.throughput import Meter, step_flops
from ..model.data import VOCABULARY, batch, packed, texts
from ..model.transformer import SIZES
from ..model.transformer import attention as plain
from ..plots.losses import save
from ..solution.impl import folder_of
from .stack import DataStack, MeshStack, attend, load

FLOOR = 0.1  # the last learning rate, relative to the peak
ERRORS = (ValueError, OSError, SafetensorError, NotImplementedError, SyntaxError, ImportError, LookupError)  # one line
BATCH_OPTIONS = ("seed", "sequences", "context")  # they determine the batches: a resumed run must not change them


def learning_rate(step: int, steps: int, warm_up: int, peak: float) -> float:
    """Return the learning rate: a linear rise to `peak` in `warm_up` steps, then half a cosine down to a tenth of it.

    The first step has peak / warm_up, not 0. With warm_up 10 and 100 steps, step 9 has the peak, step 99 a tenth of it.
    Sources: Goyal et al. 2017 (warm-up); Loshchilov and Hutter 2016, "SGDR" (cosine).
    """
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up + 1) / max(steps - warm_up, 1)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, join the process group and train. Report an error on one rank, in one line."""
    options = parse(arguments)
    with process_group() as store:
        try:
            train(options)
        except ERRORS as error:
            if store.add("complaints", 1) == 1 and first_attempt():  # one rank reports for all
                complain(str(error))
            sys.exit(2)
        except RuntimeError:
            if not store.add("complaints", 0):
                raise
            sys.exit(2)  # caused by another rank, which has reported its error


def complain(message: str) -> None:
    """Print an error in one line to stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"lab.train: {' '.join(message.split())}", style="red", markup=False)


def first_attempt() -> bool:
    """Whether torchrun has not restarted this process. After a restart, errors have been reported already."""
    return not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints an error in one line, on one rank only."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0" and first_attempt():
            complain(f"{message} (see --help)")
        sys.exit(2)


def make_parser(name: str = "lab.train", description: str = "") -> Parser:
    """Return the parser of all options."""
    parser = Parser(name, description=description or __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--mesh",
        type=degrees,
        default={},
        help="data=2,pipe=1,expert=1,tensor=2; an axis left out is 1, and data=rest is all ranks that are left",
    )
    parser.add_argument("--impl", default="student", help="student, reference or a folder (default: student)")
    folder = "of checkpoints, losses and plot (default: .cache/train; of --impl reference .cache/train/reference)"
    parser.add_argument("--folder", type=Path, help=folder)
    parser.add_argument("--fresh", action="store_true", help="forget what the folder holds; else go on from it")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model (default: tiny)")
    parser.add_argument("--experts", type=int, default=0, help="in each block; 0: dense")
    parser.add_argument("--k", type=int, default=2, help="experts for each token")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=16, help="in a batch, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b or interleaved")
    parser.add_argument("--chunks", type=int, default=1, help="of the model on each pipeline rank, if interleaved")
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism along tensor")
    parser.add_argument("--fsdp", action="store_true", help="shard along data")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3, help="the learning rate's peak")
    parser.add_argument("--warm-up", type=int, default=20, help="steps until the peak")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of a gradient")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stack", choices=["mesh", "data"], default="mesh", help="of which chapters (lab.train.stack)")
    parser.add_argument("--attention", choices=["plain", "own"], default="plain", help="own: the implementation's")
    parser.add_argument("--replace", type=exercises, default=[], help="ids of exercises, for which stand-ins train")
    return parser


def parse(arguments: list[str] | None = None, parser: Parser | None = None) -> argparse.Namespace:
    """Return the checked options. parser: the parser of `lab train`, which has more options and starts the ranks."""
    standalone, parser = parser is None, parser or make_parser()
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        minimum = {"experts": 0, "warm_up": 0, "seed": 0}.get(name, 1)
        if type(value) is int and value < minimum:
            parser.error(f"expected --{name.replace('_', '-')} of at least {minimum}, got {value}")
    if not (0 <= options.dropout < 1 and options.lr > 0 and options.clip > 0):
        parser.error(
            f"expected 0 <= --dropout < 1, --lr > 0 and --clip > 0, got {options.dropout}, {options.lr}, {options.clip}"
        )
    if options.impl not in ("student", "reference") and not Path(options.impl).is_dir():
        parser.error(f"expected --impl student, reference or a folder, got {options.impl!r}")
    if options.folder is None:
        other = () if options.impl == "student" else (Path(options.impl).resolve().name,)
        options.folder = ROOT.joinpath(".cache", "train", *other)
    world = int(os.environ.get("WORLD_SIZE", 1))
    known = math.prod(n for n in options.mesh.values() if n)
    options.mesh = {axis: n or max(world // known, 1) for axis, n in options.mesh.items()}
    ranks = math.prod(options.mesh.values())
    axes = [a for a in options.mesh if a != "data"]
    flags = [n for n in ("experts", "fsdp", "sequence", "dropout") if getattr(options, n)]
    if options.stack == "data" and (axes or flags or options.micro_batches > 1):
        rejected = ", ".join([*(f"--mesh {a}=" for a in axes), *(f"--{n}" for n in flags)]) or "--micro-batches"
        parser.error(f"expected --mesh data=… alone with --stack data, got {rejected}; --stack mesh has the rest")
    shares = max(ranks, world)  # without --mesh, all ranks of torchrun form the data axis
    if options.stack == "data" and options.sequences % shares:
        parser.error(f"expected a multiple of {shares} --sequences, one share a rank, got {options.sequences}")
    if standalone and ranks > world == 1:
        parser.error(f"--mesh has {ranks} ranks, and this is one: torchrun --nproc-per-node {ranks} -m lab.train …")
    return options


def degrees(text: str) -> dict[str, int]:
    """Parse "data=2,tensor=2" to {"data": 2, "tensor": 2}. One axis may be "rest", which gives 0."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.partition("=")
        if (
            axis not in ("data", "pipe", "expert", "tensor")
            or axis in found
            or not ((degree.isdecimal() and int(degree)) or (degree == "rest" and 0 not in found.values()))
        ):
            raise argparse.ArgumentTypeError(f"expected axes as in data=2,tensor=2, of 1 or more each, got {part!r}")
        found[axis] = 0 if degree == "rest" else int(degree)
    return found


def exercises(text: str) -> list[str]:
    """Parse ids, such as "ddp.naive,zero.zero1"."""
    ids = [*filter(None, text.split(","))]
    if unknown := [id for id in ids if id not in default().exercises]:
        raise argparse.ArgumentTypeError(f"expected ids of exercises, got {unknown[0]!r}")
    return ids


@contextlib.contextmanager
def process_group() -> Iterator[dist.Store]:
    """Join torchrun's process group; without torchrun, make a group of one rank. Yields the store of all ranks."""
    single_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ |= single_rank
    if device() == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    store, rank, world = next(dist.rendezvous("env://"))
    # The store of torchrun's agent outlives its workers. Without a prefix, workers of a second attempt would find the
    # addresses of the first attempt, and wait for dead processes. A restarted machine counts attempts from 0 again, so
    # it must not use the agent's store.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "nccl" if device() == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def device() -> str:
    """ "cuda" if each rank of this machine has its own GPU, as NCCL requires; otherwise "cpu"."""
    return "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else "cpu"


def train(options: argparse.Namespace) -> list[float]:
    """Train, and return the loss of each step, including steps before a resumed checkpoint."""
    run = Run(load(folder_of(options.impl), options.replace), options)
    corpus = packed(texts((ROOT / "handout").glob("*.md")))
    losses, start = run.resume(), time.perf_counter()
    first = len(losses)
    if first >= options.steps and (options.folder / "run.json").exists():
        run.log(
            f"nothing to train: {options.folder} holds a run of {first} steps, and --steps asks for {options.steps}; "
            f"--steps {2 * first} goes on, --fresh begins anew"
        )
        return losses
    with run.progress(first) as report:
        for step in range(first, options.steps):
            full_batch = batch(corpus, options.sequences, options.context, seed=options.seed, step=step)
            losses.append(run.step(step, *full_batch))
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                run.save(losses)
            report(step + 1, losses[-1], (step + 1 - first) * full_batch[0].numel() / (time.perf_counter() - start))
    run.finish(losses)
    return losses


class Run:
    """A training run on this rank: trains and saves the model, and reports progress."""

    def __init__(self, impl: Any, options: argparse.Namespace):
        self.options, self.lead = options, dist.get_rank() == 0
        self.device = torch.device(device())
        self.meter = Meter(self.device)
        torch.manual_seed(options.seed)
        config = replace(SIZES[options.size], vocabulary=VOCABULARY, context=options.context)
        attention = attend(impl, options.replace, self.device) if options.attention == "own" else plain
        make = MeshStack if options.stack == "mesh" else DataStack
        self.stack = make(impl, options, config, attention, self.device)
        self.flops = step_flops(config, options.sequences, options.context, options.experts and options.k)

    def resume(self) -> list[float]:
        """Load the checkpoint, and return the losses of its steps, or [] without a checkpoint."""
        options = self.options
        if self.lead:
            try:
                options.folder.mkdir(parents=True, exist_ok=True)  # fail now, not at the first checkpoint
            except OSError as error:
                raise OSError(f"expected a --folder that can be written to, got {options.folder}: {error}") from error
            if options.fresh and first_attempt():
                shutil.rmtree(options.folder / "checkpoint", ignore_errors=True)
        dist.barrier()
        if not (options.folder / "checkpoint" / "index.json").exists():
            return []
        try:
            extra = self.stack.checkpoint.load(self.stack.model, self.stack.optimizer)
            self._same_data(extra)
            losses = extra["losses"]
        except (ValueError, OSError, LookupError, TypeError, SafetensorError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{options.folder} holds a checkpoint that does not fit: {why}; --fresh forgets it, another --folder "
                f"leaves it as it is"
            ) from error
        if len(losses) < options.steps:
            self.log(f"resumed behind step {len(losses)} of {options.steps}")
        return losses

    def _same_data(self, extra: dict[str, Any]) -> None:
        """Raise ValueError if an option that determines the batches has changed: training would silently change."""
        current = {name: getattr(self.options, name) for name in BATCH_OPTIONS}
        for name, recorded in extra.get("data", current).items():
            if current[name] != recorded:
                raise ValueError(f"it was trained with --{name} {recorded}, not {current[name]}")

    def step(self, step: int, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Train one step. tokens, targets: the global batch. Return its mean loss."""
        options = self.options
        for group in self.stack.optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.warm_up, options.lr)
        local = [self.stack.share(t).to(self.device) for t in (tokens, targets)]
        with self.meter:
            return self.stack.step(*local)

    def save(self, losses: list[float]) -> None:
        extra = {"losses": losses, "data": {name: getattr(self.options, name) for name in BATCH_OPTIONS}}
        try:
            self.stack.checkpoint.save(self.stack.model, self.stack.optimizer, extra=extra)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"could not save step {len(losses)} in {self.options.folder}: {error}; the checkpoint before is whole: "
                f"make room and start again"
            ) from error

    @contextlib.contextmanager
    def progress(self, first: int) -> Iterator[Any]:
        """Show a progress bar on the first rank. Yields a function of (steps done, loss, tokens per second)."""
        columns = [
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
        ]  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), disable=not self.lead) as bar:
            task = bar.add_task("training", total=self.options.steps, completed=first, told="")

            def report(done: int, loss: float, rate: float) -> None:
                bar.update(task, completed=done, told=f"loss {loss:.3f}, {rate:,.0f} tokens/s")

            yield report

    def finish(self, losses: list[float]) -> None:
        """Write losses (JSON and a plot), throughput and memory to the folder. Every rank must call this."""
        state = [*self.stack.model.parameters(), *(v for s in self.stack.optimizer.state.values() for v in s.values())]
        state_bytes = sum(t.numel() * t.element_size() for t in state if isinstance(t, torch.Tensor))
        summary = self.meter.summary(self.flops, self.options.sequences * self.options.context, state_bytes)
        if not self.lead:
            return
        folder = self.options.folder
        (folder / "losses.json").write_text(json.dumps(losses))
        (folder / "run.json").write_text(json.dumps(summary))
        save(folder / "loss.png", {str(self.options.mesh or "one rank"): losses})
        self.log(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps: {folder / 'loss.png'}")

    def log(self, text: str) -> None:
        if self.lead:
            Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
