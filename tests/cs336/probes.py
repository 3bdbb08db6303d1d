"""What runs beside a CS336 fork: the same as beside any other submission, on the models that course has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.measure.kernels import watching
from lab.measure.memory import Held
from lab.world.group import ledger

from ..zero.probes_fsdp import at_rest


def function(impl, kind: str):
    """The autograd function, of (batch, length, dim): "pytorch" or "triton"."""
    stage = impl.flash_attention
    return stage.tiled_forward.TiledAttention if kind == "pytorch" else stage.attention.FlashAttention


def attend(impl, kind: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool) -> dict:
    """o, what was saved for backward, and the kernels and operators of forward."""
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    apply = function(impl, kind).apply
    with watching() as seen:
        o = apply(q, k, v, is_causal)
    return {"o": o.detach(), "saved": list(o.grad_fn.saved_tensors), "operators": sorted(set(seen.operators)),
            "kernels": [launch.kernel for launch in seen.launches]}  # fmt: skip


def gradients(impl, kind: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool) -> dict:
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    function(impl, kind).apply(q, k, v, is_causal).backward(do)
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


class Toy(nn.Module):
    """A perceptron with a tensor that is not trained, and perhaps a weight in two places; no buffers."""

    def __init__(self, width: int, tied: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        if tied:
            self.layers[3].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def wrapped(impl, kind: str, module: nn.Module, megabytes: float) -> nn.Module:
    if kind == "overlapped":
        return impl.ddp.overlapped.OverlappedDDP(module)
    return impl.ddp.bucketed.BucketedDDP(module, int(megabytes * (1 << 20)))


def train(impl, kind: str, tied: bool, states: list, shares: list, lr: float, megabytes: float) -> dict:
    """The state after steps on this rank's shares, and what was sent, by phase. shares: [rank][step] -> (x, y)."""
    rank = dist.get_rank()
    m = Toy(shares[0][0][0].shape[1], tied)
    m.load_state_dict(states[rank])
    with ledger.phase("start"):
        model = wrapped(impl, kind, m, megabytes)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr)
    for x, y in shares[rank]:
        optimizer.zero_grad()
        with ledger.phase("forward"):
            out = model(x)
        ((out - y) ** 2).mean().backward()
        with ledger.phase("finish"):
            model.finish_gradient_synchronization()
        optimizer.step()
    return {"state": dict(nn.Module.state_dict(m)), "rows": ledger.plain()}


class Tokens(nn.Module):
    """Embedding, a norm without weights in its own dtype, linear layers without bias: those that are cut there."""

    def __init__(self, vocabulary: int, width: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
            x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.gain).to(x.dtype)
        return self.head(x)


def train_sharded(impl, sizes: list, state: dict, batches: list, lr: float, dtype: str) -> dict:
    """The whole state after steps on this rank's batches, [rank][step] -> (tokens, targets), and what was sent."""
    m = Tokens(*sizes)
    m.load_state_dict(state)
    options = {"compute_dtype": torch.float16} if dtype == "float16" else {}
    model = (impl.zero.fsdp_mixed.FSDPMixed if options else impl.zero.fsdp_gather.FSDP)(m, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for tokens, targets in batches[dist.get_rank()]:
        optimizer.zero_grad()
        with ledger.phase("forward"):
            out = model(tokens).float()
        with ledger.phase("backward"):
            nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
        with ledger.phase("finish"):
            model.finish_gradient_synchronization()
        optimizer.step()
    rows = ledger.plain()
    dtypes = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
    return {"state": {n: t.clone() for n, t in model.full_state().items()}, "rows": rows, "dtypes": dtypes}


def held(impl, sizes: list, tokens: Tensor) -> dict:
    """Bytes of a sharded model: at rest, between forward and backward, and with gradients."""
    told = {}
    with Held() as memory:
        model = impl.zero.fsdp_gather.FSDP(Tokens(*sizes))
        told["rest"] = at_rest(memory)
        out = model(tokens).sum()
        told["between"] = at_rest(memory)
        out.backward()
        del out
        model.finish_gradient_synchronization()
        told["gradients"] = at_rest(memory)
    return told
