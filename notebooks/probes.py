"""What notebooks measure beside an implementation and no test asks for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.cluster.costs import sent_bytes
from lab.measure.memory import Held
from lab.model.data import batch, packed
from lab.model.data import texts as read
from lab.model.transformer import SIZES, Config, Transformer
from lab.ranks.group import ledger

STAGES = ("none", "zero1", "zero2", "zero3")


def bytes_by_kind(impl: Any, method: str) -> dict:
    """Bytes that a rank holds after the second step of AdamW on a tiny transformer, and the sizes of its parameters."""
    torch.manual_seed(0)
    m: nn.Module = Transformer(SIZES["tiny"])
    sizes = [p.numel() for p in m.parameters()]
    tokens = torch.randint(256, (1, 8))
    adamw = torch.optim.AdamW
    with Held() as memory:
        optimizer: Any
        if method == "zero3":
            m = impl.zero.fsdp_gather.FSDP(m, small=0)
        if method == "zero2":
            optimizer = impl.zero.zero2.ZeRO2(m, adamw, lr=0.01)
        elif method == "zero1":
            optimizer = impl.zero.zero1.ShardedOptimizer(m.parameters(), adamw, lr=0.01)
        else:
            optimizer = adamw(m.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            m(tokens).sum().backward()
            if method == "zero3":
                m.finish_gradient_synchronization()  # type: ignore[operator]
            optimizer.step()
        held = memory.now()
    inner = optimizer.optimizer if method == "zero2" else optimizer
    stepped = [p for g in inner.param_groups for p in g["params"]]
    told = {
        "parameters": sum(p.nbytes for p in m.parameters()),
        "gradients": sum(p.grad.nbytes for p in stepped if p.grad is not None),
        "optimizer": sum(t.nbytes for s in inner.state.values() for t in s.values() if t.ndim),
    }
    return {**told, "else": held - sum(told.values()), "sizes": sizes}


SMALL = Config(layers=4, width=32, heads=4, kv_heads=2, hidden=64, vocabulary=256, context=32)
EXPERTS = 4


def mesh_run(impl: Any, degrees: dict, plan: dict, steps: int, texts: str) -> dict:
    """Losses of a small mixture-of-experts transformer on the bytes of some texts, and bytes sent in the last step.

    texts: a folder of Markdown. sent: by the ranks of each group that this rank sent over; tokens: of each expert of
    each layer on this rank, in the last step.
    """
    parallel, compose = impl.mesh.parallel, impl.mesh.compose
    torch.manual_seed(0)
    mesh = impl.mesh.mesh.Mesh(**degrees)
    own = compose.parallelize(parallel.to_moe(Transformer(SMALL), EXPERTS), mesh, parallel.Plan(**plan))
    optimizer = torch.optim.AdamW(own.parameters(), lr=3e-3)
    loads: dict[str, list[int]] = {}
    for name, module in own.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_hook(lambda _, given, y, name=name: loads.update({name: list(given[1])}))
    corpus, losses, first = packed(read(Path(texts).glob("*.md"))), [], 0
    for step in range(steps):
        first = len(ledger.rows)
        whole = batch(corpus, 8, SMALL.context, seed=0, step=step)
        losses.append(float(compose.train_step(own, optimizer, *(parallel.share(t, mesh) for t in whole))))
    sent: dict[str, float] = {}
    for row in ledger.rows[first:]:
        key = " ".join(map(str, row.group))
        sent[key] = sent.get(key, 0.0) + sent_bytes(row.op, row.bytes, len(row.group))
    return {"losses": losses, "sent": sent, "loads": sorted(loads.items())}


def mesh_cost(impl: Any, degrees: dict, plan: dict) -> dict:
    """Bytes by axis that the accounting says for the first stage."""
    module = impl.mesh.accounting
    work = module.Workload(SMALL, 8, SMALL.context, plan.get("micro_batches", 1), EXPERTS)
    return asdict(module.accounting(work, module.Degrees(**degrees), fsdp=plan.get("fsdp", False)))["bytes"]


def mesh_groups(impl: Any, degrees: dict) -> dict:
    """The groups of each axis, of a mesh on paper."""
    mesh = impl.mesh.mesh.Mesh(**degrees, rank=0)
    return {axis: mesh.partition(axis) for axis in mesh.sizes}


def schedules(impl: Any, stages: int, micro_batches: int, chunks: int) -> dict:
    """[kind, micro-batch, chunk] of each rank's actions, by schedule."""
    m = impl.mesh
    made = {
        "GPipe": lambda r: m.schedule_gpipe.schedule_gpipe(r, stages, micro_batches),
        "1F1B": lambda r: m.schedule_1f1b.schedule_1f1b(r, stages, micro_batches),
        "interleaved": lambda r: m.schedule_interleaved.schedule_interleaved(r, stages, micro_batches, chunks),
    }
    return {
        name: [[[a.kind, a.micro_batch, a.chunk] for a in make(rank)] for rank in range(stages)]
        for name, make in made.items()
    }
