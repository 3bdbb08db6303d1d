"""One training step of a small transformer in a wrapper, for a timeline: what was computed and sent, and when."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lab.measure import clock
from lab.model.transformer import Config, Transformer
from lab.ranks.group import ledger

from .probes import wrap


def step(impl, kind: str, sizes: dict, batch: int, options: dict) -> dict:
    """The second step on each rank: [kind, name, start, end] of what was computed, and the ledger's rows.

    sizes: what lab.model.transformer.Config takes; options: what the wrapper takes.
    """
    torch.manual_seed(0)
    config = Config(**sizes)
    wrapped = wrap(impl, kind, Transformer(config), **options)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
    for _ in range(2):
        first = len(ledger.rows)
        optimizer.zero_grad()
        dist.barrier()
        times = [clock.perf_counter()]
        with ledger.phase("forward"):
            loss = F.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        times.append(clock.perf_counter())
        loss.backward()
        times.append(clock.perf_counter())
        with ledger.phase("finish"):
            wrapped.finish_gradient_synchronization()
        times.append(clock.perf_counter())
        optimizer.step()
        times.append(clock.perf_counter())
    forward, backward, finish, update, end = times
    compute = [["forward", "forward", forward, backward], ["backward", "backward", backward, finish]]
    rows = [r.plain() for r in ledger.rows[first:] if r.op != "barrier"]
    return {"compute": [*compute, ["step", "optimizer", update, end]], "rows": rows}
