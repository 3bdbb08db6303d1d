"""Shared by benchmarks of ranks: a model, steps in turn, bytes that a step holds and sends, and their tables."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lab.cluster.costs import Link, sent_bytes
from lab.course.assignment import ROOT
from lab.measure.memory import LiveStorages
from lab.model.transformer import Config, Transformer
from lab.ranks.group import ledger

CONFIG = Config(layers=6, width=512, heads=8, kv_heads=8, hidden=1408, vocabulary=512, context=64)  # 20 M parameters
RATE = 1e-4
WARM_UP = 3  # steps per variant that are not timed
Step = Callable[[], object]


# In the ranks.


def model() -> Transformer:
    """Return a transformer, the same on every rank and at every call."""
    torch.manual_seed(0)
    return Transformer(CONFIG)


def tokens_of_rank(length: int = 32) -> tuple[Tensor, Tensor]:
    """Return one sequence and its targets, different on each rank."""
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = torch.randint(CONFIG.vocabulary, (2, 1, length)).unbind()
    return tokens, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over tokens."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def backward(wrapped: Any, tokens: Tensor, targets: Tensor) -> None:
    """Run forward and backward; if the wrapper is ours, wait for its gradients."""
    loss_of(wrapped(tokens), targets).backward()
    if hasattr(wrapped, "finish_gradient_synchronization"):
        wrapped.finish_gradient_synchronization()


def fully_sharded(plain: Any) -> nn.Module:
    """Apply torch's fully_shard to each block, then to the rest, as its documentation does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in plain.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    return plain


def time_in_turn(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of `rounds` steps per variant. Variants step in turn, and all ranks start a step together."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + WARM_UP):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if i >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times


def second_step(make: Callable[[], Step]) -> dict[str, float]:
    """Bytes of all storages that torch operations used (peak, and after the step), and bytes sent, by the ledger."""
    with LiveStorages() as memory:
        step = make()
        step()
        first = len(ledger.rows)
        memory.restart()
        step()
        usage: dict[str, float] = {"peak": memory.peak, "kept": memory.now()}
    return {**usage, "sent": sum(_sent(row) for row in ledger.rows[first:])}


def _sent(row: Any) -> float:
    """Count bytes as handout/conventions.md does; of a broadcast, the mean over ranks, since the root changes."""
    world = len(row.group)
    return row.bytes * (world - 1) / world if row.op == "broadcast" else sent_bytes(row.op, row.bytes, world)


# In the process that asks.


def compare(
    name: str, doc: str | None, note: str, measure: Callable[..., list[dict]],
    what: str = "", kinds: Sequence[str] = ("",), ranks: Sequence[int] = (2, 4),
) -> None:  # fmt: skip
    """A benchmark's command line: measure each kind with each number of ranks, on Gloo and on each link; write results.

    measure(runner, kind, ranks, rounds, memory, network) returns a row per variant. network: options of `Runner.run`.
    memory: bytes of each variant, which do not depend on the network; measure fills it if it is empty. what: the name
    of the option that chooses among kinds, and of their column.
    """
    from lab.harness.runner import Executor, Runner  # imported here, since the ranks import this file and need neither

    from .results import write

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(ranks))
    parser.add_argument("--rounds", type=int, default=15)
    links = [_link("1e-4:400e6"), _link("1e-4:1600e6")]
    parser.add_argument("--links", nargs="*", type=_link, default=links, help="seconds:bytes a second")
    parser.add_argument("--print", action="store_true", help="keep nothing")
    if what:
        parser.add_argument(f"--{what}", dest="kinds", nargs="+", choices=kinds, default=kinds)
    options = parser.parse_args()
    rows = []
    for kind, world in itertools.product(options.kinds if what else kinds, options.ranks):
        memory: dict[str, dict[str, str]] = {}
        for link in [None, *options.links]:
            network = {"link": link} if link else {"network": "gloo"}  # the switch simulates links; Gloo bypasses it
            with closing(Runner(Executor(ROOT / "reference"))) as runner:
                new = measure(runner, kind, world, options.rounds, memory, network)
            head = {**({what: kind} if what else {}), "network": _in_words(link), "ranks": world}
            rows += [{**head, **row} for row in new]
            print(*rows[-len(new) :], sep="\n", flush=True)
    if not options.print:
        print(write(name, rows, note))


def _link(text: str) -> Link:
    try:
        alpha_s, bytes_per_s = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds:bytes a second, as 1e-4:400e6, got {text}") from None
    return Link(alpha_s, bytes_per_s)


def _in_words(link: Link | None) -> str:
    return f"link, {1e3 * link.alpha_s:g} ms, {link.bytes_per_s / 1e6:g} MB/s" if link else "plain Gloo"


def slowest(reports: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Seconds of the slowest rank, per step of each variant."""
    return {name: [max(times) for times in zip(*(s[name] for s in reports), strict=True)] for name in reports[0]}


def largest(reports: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """MiB of each kind of bytes, on the rank with the most."""
    return {what: f"{max(each[what] for each in reports) / 2**20:.1f}" for what in reports[0]}


def time_columns(values: list[float], others: Mapping[str, float]) -> dict[str, str]:
    """The median in milliseconds, its spread (half the interquartile range), and its ratio to each of others."""
    low, median, high = statistics.quantiles(values, n=4)
    spread = f"±{100 * (high - low) / 2 / median:.0f} %"
    ratios = {name: f"{median / other:.2f}" for name, other in others.items()}
    return {"ms": f"{1e3 * median:.0f}", "spread": spread, **ratios}
