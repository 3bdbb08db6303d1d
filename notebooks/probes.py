"""What notebooks measure beside an implementation and no test asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lab.model.transformer import SIZES, Transformer
from tests.zero.probes_fsdp import Held

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
