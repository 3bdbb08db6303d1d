"""Runs a training step as one rank of any mesh, in one process without data: what it would send, compute and hold.

The step is the implementation's own code, run once, on tensors of the meta device: they have shapes and no numbers. Its
process groups are as large as the mesh, and write the ledger that Gloo's do (lab/ranks/group.py), but nobody is at the
other end: what is sent is written down, and what is received has been. Nothing here is computed from a formula.

Numbers that the host must know come through `lab.dryrun.host`, which gives balanced ones. What another rank would do is
known by running that one, too: `lab.dryrun.accounts.matched` compares all stages of a pipeline, and a neighbour along
each other axis.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..cluster.events import Compute
from ..measure.process import settled
from ..measure.tally import NeedsData, Tally
from ..model.transformer import Transformer, attention
from ..ranks import group
from ..ranks.ledger import Row
from .accounts import Account, Step


class DryGroup(group.LedgerGroup):
    """A group with nobody at the other end: every operation is done at once, and nothing has moved."""

    events: ClassVar[list[Any]] = []

    def carry(self, row: Row, sends: Sequence[Tensor], into: Sequence[Tensor], segments: list, details: dict) -> Any:
        self.events.append(["issue", row.number, row.tag])
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(list(into))
        return _create_work_from_future(future)

    @classmethod
    def awaited(cls, row: Row) -> None:
        cls.events.append(["wait", row.number])


def dry(impl: Any, plain: dict, rank: int) -> str:
    """An account, as JSON, of `rank`: in a process of its own, which has no group yet."""
    step = Step.of(plain)
    group.join(rank, step.world, None, kind=DryGroup)
    torch.set_default_device("meta")
    # Optimizers keep their count of steps on the host, and read it.
    before = register_optimizer_step_pre_hook(lambda *_: torch.set_default_device("cpu"))
    after = register_optimizer_step_post_hook(lambda *_: torch.set_default_device("meta"))
    try:
        return _account(impl, step)
    except TypeError as error:
        if "meta device type tensor to numpy" not in str(error):
            raise
        raise NeedsData(f"{error}: in a dry run a tensor has no numbers; lab.dryrun.host(tensor, balanced=…)") from None
    finally:
        before.remove()
        after.remove()
        torch.set_default_device("cpu")
        dist.destroy_process_group()


def real(impl: Any, plain: dict) -> str:
    """The same of a rank that has real tensors, and others to talk to: what a dry run is to be compared with.

    Its router is forced to be even, as `host` says in a dry run that it is.
    """
    step = Step.of(plain)
    if step.experts:
        moe, route = impl.mesh.moe, impl.mesh.moe.route

        def evenly(logits: Tensor, k: int, **options: Any) -> Any:
            choices = torch.arange(len(logits) * k) % logits.shape[1]
            return replace(route(logits, k, **options), experts=choices.view(len(logits), k))

        moe.route = evenly
    return _account(impl, step, patience_s=0.3)


def _account(impl: Any, step: Step, patience_s: float = 0.0) -> str:
    """patience_s: for Gloo's threads, which let go of the last messages when they come to it."""
    ledger = group.ledger
    tally = Tally(lambda: ledger.now() or "forward")
    DryGroup.events = tally.events  # one list, so that what is sent stands between what is computed
    with tally:
        whole = Transformer(replace(step.config, context=step.context), fused_attention if step.fused else attention)
        parallel, optimizer, train_step = (_replicated if step.replicated else _built)(impl, step, whole)
        own = list(dict.fromkeys(parallel.parameters()))
        tally.name("parameters", own)
        tally.name("buffers", parallel.buffers())
        for p in own:  # a step with gradients of 0 makes the state that all later ones find
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        state = (t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, Tensor))
        tally.name("optimizer", state)
        tokens = torch.zeros(
            step.sequences // step.mesh["data"] // step.mesh["expert"], step.context, dtype=torch.int64
        )
        gc.collect()
        gc.disable()  # what is held at most must not depend on when garbage is looked for
        first, start = len(ledger.rows), len(tally.events)
        tally.flops = 0
        with _stepping(optimizer, own, tally):
            train_step(parallel, optimizer, tokens, tokens)
        gc.enable()
        peak, resting = tally.memory(since=start)
        if patience_s:
            settled(lambda: sum(tally.memory(since=start)[1].values()), patience_s=patience_s)
            _, resting = tally.memory(since=start)
    rows = [vars(row) for row in ledger.rows[first:]]
    trace, segments = _compact(tally.events[start:], first)
    parameters = sum(p.numel() for p in own)
    account = Account(ledger.rank, rows, tally.flops, parameters, resting, peak, trace, segments)
    return json.dumps(vars(account), separators=(",", ":"))


Built = tuple[Any, torch.optim.Optimizer, Callable[..., object]]


def _built(impl: Any, step: Step, whole: Transformer) -> Built:
    """The implementation's own share of the model, an optimizer of it, and what takes a step."""
    mesh = impl.mesh.mesh.Mesh(**step.mesh)
    given = impl.mesh.parallel
    if step.experts:
        given.to_moe(whole, step.experts, step.k)
    plan = given.Plan(
        micro_batches=step.micro_batches, schedule=step.schedule, chunks=step.chunks, sequence=step.sequence,
        fsdp=step.fsdp,
    )  # fmt: skip
    parallel = impl.mesh.compose.parallelize(whole, mesh, plan)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4), impl.mesh.compose.train_step


def _replicated(impl: Any, step: Step, whole: Transformer) -> Built:
    """The same of a replica with bucketed gradients and a sharded optimizer."""
    replica = impl.ddp.bucketed.BucketedDDP(whole, bucket_bytes=25 << 20)
    optimizer = impl.zero.zero1.ShardedOptimizer(whole.parameters(), torch.optim.AdamW, lr=1e-4)

    def train_step(replica: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(replica(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        replica.finish_gradient_synchronization()
        optimizer.step()

    return replica, optimizer, train_step


def fused_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """softmax(q kᵀ / √dim) v in one kernel, forward and backward; on the CPU and without data the same operator."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]


@contextlib.contextmanager
def _stepping(optimizer: torch.optim.Optimizer, own: list[Tensor], tally: Tally) -> Iterator[None]:
    """Call what happens "forward", what the optimizer does "step", and what it is given "gradients"."""
    inside = contextlib.ExitStack()

    def before(*_: Any) -> None:
        tally.name("gradients", (p.grad for p in own if p.grad is not None))
        inside.enter_context(group.ledger.phase("step"))

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: inside.close())]
    with group.ledger.phase("forward"):
        yield
    for hook in hooks:
        hook.remove()


def _compact(events: list[Any], first: int) -> tuple[list[list], list[list]]:
    """(trace, segments) of an Account; rows count from `first`."""
    trace: list[list] = []
    numbers: dict[tuple, int] = {}
    segments: list[list] = []
    kernels: list[Compute] = []
    held: Counter[str] = Counter()

    def cut() -> None:
        memory = tuple((kind, change) for kind, change in held.items() if change)
        if kernels or memory:
            key = (*map(id, kernels), memory)
            if key not in numbers:
                numbers[key] = len(segments)
                segments.append([[[*astuple(kernel)] for kernel in kernels], [list(change) for change in memory]])
            trace.append(["run", numbers[key]])
            kernels.clear()
            held.clear()

    # What comes behind the last backward completes gradients, or uses them.
    last = max((i for i, e in enumerate(events) if type(e) is Compute and e.phase == "backward"), default=len(events))
    events = events[: last + 1] + [
        replace(e, phase="step") if type(e) is Compute and e.phase == "forward" else e for e in events[last + 1 :]
    ]
    for event in events:
        if type(event) is Compute:
            if kernels and kernels[-1].phase != event.phase:
                cut()
            kernels.append(event)
        elif type(event) is tuple:
            held[event[0].kind] += event[1]
        elif event[1] >= first:
            cut()
            trace.append([event[0], event[1] - first, *event[2:]])
    cut()
    return trace, segments
