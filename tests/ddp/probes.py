"""What runs beside a data-parallel wrapper: build a model on each rank, train it, say what was sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.raising import raised
from lab.ranks import gates
from lab.solution.wire import PerRank


class Model(nn.Module):
    """A small model with what trips wrappers: a tied weight, frozen and unused parameters, three kinds of buffer."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.layers.append(nn.Linear(width, width))
        self.layers[-1].weight = self.layers[0].weight  # tied
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(width + 1))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(width), persistent=False)  # in no state_dict()

    def forward(self, x: torch.Tensor, *, shift: float = 0.0, at: str = "") -> torch.Tensor:
        """at: the step and micro-batch that its gates are named by; "" without gates. All of it is layer 0."""
        if at:
            x = gates.in_backward(gates.in_forward(x, f"{at} begins"), f"{at} ends")
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        y = self.norm(x) * self.frozen + shift
        return gates.in_backward(y, f"{at} layer 0") if at else y


def model(width: int, depth: int, state: dict) -> Model:
    """A model that holds this state."""
    m = Model(width, depth).to(state["frozen"].dtype)
    m.load_state_dict(state)
    return m


def wrap(impl, kind: str, m: nn.Module, group=None, **options):
    """The wrapper of this kind around m. options: what only this kind takes."""
    made = {
        "naive": lambda: impl.ddp.naive.NaiveDDP,
        "flat": lambda: impl.ddp.flat.FlatDDP,
        "overlapped": lambda: impl.ddp.overlapped.OverlappedDDP,
        "bucketed": lambda: impl.ddp.bucketed.BucketedDDP,
    }[kind]()
    return made(m, group=group, **options) if group is not None else made(m, **options)


def start(impl, kind: str, width: int, depth: int, states: PerRank) -> dict:
    """The state right after wrapping, and the buffer that is not in it; each rank brings its own."""
    m = model(width, depth, states[dist.get_rank()])
    m.passing.fill_(dist.get_rank() + 1)
    wrap(impl, kind, m)
    return {"state": dict(nn.Module.state_dict(m)), "passing": m.passing}


def train(impl, kind: str, width: int, depth: int, states: PerRank, shares: PerRank, lr: float) -> dict:
    """Train on this rank's share of each batch. shares: [rank][step] -> (x, y)."""
    rank = dist.get_rank()
    m = model(width, depth, states[rank])
    wrapped = wrap(impl, kind, m)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    outputs, none = [], []
    for step, (x, y) in enumerate(shares[rank]):
        optimizer.zero_grad()
        out = wrapped(x.requires_grad_(), shift=0.25, at=f"{step}.0")
        outputs.append(out.detach())
        ((out - y) ** 2).mean().backward()
        wrapped.finish_gradient_synchronization()
        none.append(sorted(n for n, p in m.named_parameters() if p.grad is None))
        optimizer.step()
    return {"state": dict(nn.Module.state_dict(m)), "outputs": outputs, "without_gradient": none}


def gradients(impl, kind: str, values: PerRank, groups: list) -> dict:
    """Average given gradients; with groups ([[ranks], …]) the wrapper gets the one this rank is in."""
    rank = dist.get_rank()
    m = Given(values[rank], rank)
    made = [dist.new_group(ranks) for ranks in groups]
    mine = [g for g, ranks in zip(made, groups, strict=True) if rank in ranks]
    gates.mark("when it was made")
    wrapped = wrap(impl, kind, m, *mine)
    start = [float(t.detach().flatten()[0]) for t in (*m.parameters(), *m.buffers())]  # buffers in no state_dict() too
    gates.mark("in forward or backward")
    wrapped(values[rank]).backward()
    gates.mark("in finish_gradient_synchronization()")
    wrapped.finish_gradient_synchronization()
    return {"gradients": [p.grad for p in m.weights], "start": sorted(set(start))}


def laid_otherwise(impl, kind: str, values: PerRank) -> list:
    """Average gradients that lie in one buffer already, but each transposed, as whoever sets `.grad` may leave them."""
    mine = values[dist.get_rank()]
    m = Given(mine, 0)
    wrapped = wrap(impl, kind, m)
    buffer = torch.cat([v.t().flatten() for v in mine])
    for p, v, piece in zip(m.weights, mine, buffer.split([v.numel() for v in mine]), strict=True):
        p.grad = piece.view(v.t().shape).t()
    wrapped.finish_gradient_synchronization()
    return [p.grad for p in m.weights]


def twice(impl, kind: str, values: PerRank, options: dict) -> dict:
    """Two backwards before one synchronization, with nothing said of it: what is raised, or the gradients."""
    m = Given(values[dist.get_rank()], 0)
    m.unused = nn.Parameter(torch.zeros(2))  # its bucket does not fill up
    wrapped = wrap(impl, kind, m, **options)

    def step() -> None:
        for i in range(2):
            gates.mark(f"backward {i}")
            wrapped(values[dist.get_rank()]).backward()
        gates.mark("finish")
        wrapped.finish_gradient_synchronization()

    return {"raised": raised(step), "gradients": [p.grad for p in m.weights]}


class Given(nn.Module):
    """The gradient of each weight is what forward is given for it; weights and buffers start as the rank's number."""

    def __init__(self, values: list, rank: int):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full_like(v, rank)) for v in values)
        self.register_buffer("place", torch.tensor(float(rank)))
        self.register_buffer("passing", torch.tensor(float(rank)), persistent=False)

    def forward(self, values: list) -> torch.Tensor:
        return sum((p * v).sum() for p, v in zip(self.weights, values, strict=True))
