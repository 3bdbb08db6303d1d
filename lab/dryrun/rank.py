"""Runs a training step as one rank of any mesh, in one process without data; records messages, FLOPs and memory.

It runs the implementation's own code once, on tensors of the meta device, which have shapes and no numbers. The process
groups are as large as the mesh, and write the usual ledger (lab/ranks/group.py). But there are no other ranks: we
record each operation, and it ends at once. No result comes from a formula.

If the host needs a number, `lab.dryrun.host` returns one for balanced data. To know what another rank does, run that
rank, too: `lab.dryrun.matching` compares all stages of a pipeline, and a neighbour along each other axis.
"""

import contextlib
import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..cluster.events import Compute
from ..measure.process import lowest_bytes
from ..measure.tally import NeedsData, Tally
from ..model.transformer import Transformer, attention
from ..ranks import group
from ..ranks.port import SwitchConnection
from .accounts import Account, Step


class DryConnection(SwitchConnection):
    """A connection without other ranks: every operation is done at once, and moves no data."""

    def __init__(self, events: list[Any]):
        self.events, self._asked = events, {}

    def tell(self, header: dict[str, Any], payload: Sequence[Tensor] = ()) -> None:
        if header.get("again"):
            raise RuntimeError("on Gloo, wait() of a message returns once, and never again")
        if header["do"] == "issue":
            self.events.append(["issue", header["number"], header.get("tag", 0)])
            self._handle({"number": header["number"]}, 0)
        if header["do"] == "wait" or header.get("waits"):
            self.events.append(["wait", header["number"]])


def dry(impl: Any, step_dict: dict, rank: int) -> str:
    """Run `rank` without data, and return its account as JSON. Needs a new process without a process group."""
    step = Step.of(step_dict)
    tally = Tally(_phase)
    group.join(rank, step.world, DryConnection(tally.events))  # one list, so that messages and kernels are in order
    torch.set_default_device("meta")
    # Optimizers keep their step count on the CPU, and read it.
    before = register_optimizer_step_pre_hook(lambda *_: torch.set_default_device("cpu"))
    after = register_optimizer_step_post_hook(lambda *_: torch.set_default_device("meta"))
    try:
        return _account(impl, step, tally)
    except TypeError as error:
        if "meta device type tensor to numpy" not in str(error):
            raise
        raise NeedsData(f"{error}: in a dry run a tensor has no numbers; lab.dryrun.host(tensor, balanced=…)") from None
    finally:
        before.remove()
        after.remove()
        torch.set_default_device("cpu")
        dist.destroy_process_group()


def real(impl: Any, step_dict: dict) -> str:
    """Run a real rank, with data and other ranks, and return its account as JSON, to compare with a dry run.

    We replace its router by a balanced one, as in a dry run.
    """
    step = Step.of(step_dict)
    if step.experts:
        moe, route = impl.mesh.moe, impl.mesh.moe.route

        def balanced_route(logits: Tensor, k: int, **options: Any) -> Any:
            choices = torch.arange(len(logits) * k) % logits.shape[1]
            return replace(route(logits, k, **options), experts=choices.view(len(logits), k))

        moe.route = balanced_route
    return _account(impl, step, Tally(_phase), patience_s=0.3)


def _phase() -> str:
    return group.ledger.now() or "forward"


def _account(impl: Any, step: Step, tally: Tally, patience_s: float = 0.0) -> str:
    """Run the step, and return its account as JSON. patience_s: time for Gloo's threads to free the last messages."""
    ledger = group.ledger
    with tally:
        parallel = _build(impl, step)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        parameters = list(dict.fromkeys(parallel.parameters()))
        tally.set_kind("parameters", parameters)
        tally.set_kind("buffers", parallel.buffers())
        for p in parameters:  # a first step with gradients of 0 makes the optimizer's state
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        state = (t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor))
        tally.set_kind("optimizer", state)
        tokens = torch.zeros(
            step.sequences // step.mesh["data"] // step.mesh["expert"], step.context, dtype=torch.int64
        )
        gc.collect()
        gc.disable()  # the peak must not depend on when garbage is collected
        first_row, first_event = len(ledger.rows), len(tally.events)
        tally.flops = 0
        with _stepping(optimizer, parameters, tally):
            impl.mesh.compose.train_step(parallel, optimizer, tokens, tokens)
        gc.enable()
        peak, at_end = tally.memory(since=first_event)
        if patience_s:
            lowest_bytes(lambda: sum(tally.memory(since=first_event)[1].values()), patience_s=patience_s)
            _, at_end = tally.memory(since=first_event)
    rows = [vars(row) for row in ledger.rows[first_row:]]
    trace, segments = _compact(tally.events[first_event:], first_row)
    count = sum(p.numel() for p in parameters)
    account = Account(ledger.rank, rows, tally.flops, count, at_end, peak, trace, segments)
    return json.dumps(vars(account), separators=(",", ":"))


def _build(impl: Any, step: Step) -> Any:
    """Return the implementation's parallel model on this rank."""
    model = Transformer(replace(step.config, context=step.context), fused_attention if step.fused else attention)
    mesh = impl.mesh.mesh.Mesh(**step.mesh)
    parallel = impl.mesh.parallel
    if step.experts:
        parallel.to_moe(model, step.experts, step.k)
    plan = parallel.Plan(
        micro_batches=step.micro_batches, schedule=step.schedule, chunks=step.chunks, sequence=step.sequence,
        fsdp=step.fsdp,
    )  # fmt: skip
    return impl.mesh.compose.parallelize(model, mesh, plan)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """softmax(q kᵀ / √dim) v in one kernel, forward and backward: torch's CPU operator also runs on meta tensors."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]


@contextlib.contextmanager
def _stepping(optimizer: torch.optim.Optimizer, parameters: list[Tensor], tally: Tally) -> Iterator[None]:
    """Record the phases "forward" and "step" (the optimizer), and count gradients' memory as "gradients"."""
    contexts = contextlib.ExitStack()

    def before(*_: Any) -> None:
        tally.set_kind("gradients", (p.grad for p in parameters if p.grad is not None))
        contexts.enter_context(group.ledger.phase("step"))

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: contexts.close())]
    with group.ledger.phase("forward"):
        yield
    for hook in hooks:
        hook.remove()


def _compact(events: list[Any], first: int) -> tuple[list[list], list[list]]:
    """Return (trace, segments) of an Account. first: number of the first row that counts.

    Kernels of one phase between two messages form a segment. Equal segments are stored once.
    """
    trace: list[list] = []
    numbers: dict[tuple, int] = {}
    segments: list[list] = []
    kernels: list[Compute] = []
    changes: Counter[str] = Counter()

    def end_segment() -> None:
        memory = tuple((kind, change) for kind, change in changes.items() if change)
        if kernels or memory:
            key = (*map(id, kernels), memory)
            if key not in numbers:
                numbers[key] = len(segments)
                segments.append([[[*astuple(kernel)] for kernel in kernels], [list(change) for change in memory]])
            trace.append(["run", numbers[key]])
            kernels.clear()
            changes.clear()

    # Kernels after the last backward complete the gradients or use them, so they belong to the step.
    last = max((i for i, e in enumerate(events) if type(e) is Compute and e.phase == "backward"), default=len(events))
    events = events[: last + 1] + [
        replace(e, phase="step") if type(e) is Compute and e.phase == "forward" else e for e in events[last + 1 :]
    ]
    for event in events:
        if type(event) is Compute:
            if kernels and kernels[-1].phase != event.phase:
                end_segment()
            kernels.append(event)
        elif type(event) is tuple:
            changes[event[0].kind] += event[1]
        elif event[1] >= first:
            end_segment()
            trace.append([event[0], event[1] - first, *event[2:]])
    end_segment()
    return trace, segments
