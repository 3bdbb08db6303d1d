"""Probes of data-parallel wrappers: build a model on each rank, and average given gradients."""

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.raising import raised
from lab.ranks import gates
from lab.solution.wire import PerRank


class Model(nn.Module):
    """A small model with difficult cases: a tied weight, frozen and unused parameters, three kinds of buffer."""

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
        self.register_buffer("passing", torch.zeros(width), persistent=False)  # not in state_dict()

    def forward(self, x: torch.Tensor, order: list, *, shift: float = 0.0, prefix: str = "") -> torch.Tensor:
        """prefix: step and micro-batch in the names of its gates; "": no gates. To gates, the model is layer 0."""
        if prefix:
            x = gates.in_backward(gates.in_forward(x, f"{prefix} begins"), f"{prefix} ends")
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        y = self.norm(x) * self.frozen + shift
        return gates.in_backward(y, f"{prefix} layer 0") if prefix else y


def group_of(rank: int, groups: list) -> dict:
    """Return {"group": this rank's group}, or {} if no group has this rank."""
    handles = [dist.new_group(ranks) for ranks in groups]
    local = [g for g, ranks in zip(handles, groups, strict=True) if rank in ranks]
    return {"group": local[0]} if local else {}


def fill(parameters: list, gradients: list) -> None:
    """Set .grad of each parameter to a copy of its gradient, or to None."""
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = None if g is None else g.clone()


def parameters_of(gradients: list) -> list[nn.Parameter]:
    """Return one parameter of zeros per gradient, with that gradient; for None, a parameter without a gradient."""
    parameters = [nn.Parameter(torch.zeros(2) if g is None else torch.zeros_like(g)) for g in gradients]
    fill(parameters, gradients)
    return parameters


def wrap(impl, kind: str, m: nn.Module, **options):
    """Wrap m in the wrapper of this kind. options: the wrapper's arguments, such as group."""
    return getattr(getattr(impl.ddp, kind), f"{kind.title()}DDP")(m, **options)


def start(impl, kind: str, width: int, depth: int, states: PerRank) -> dict:
    """Return the state after wrapping, with the non-persistent buffer. Before it, values differ between ranks."""
    m = Model(width, depth)
    m.load_state_dict(states[dist.get_rank()])
    m.passing.fill_(dist.get_rank() + 1)
    wrap(impl, kind, m)
    return {**nn.Module.state_dict(m), "passing": m.passing}


def gradients(impl, kind: str, values: PerRank, groups: list) -> dict:
    """Average given gradients over this rank's group. groups: [[ranks], …]; [] for the default group."""
    rank = dist.get_rank()
    m = Given(values[rank], rank)
    group = group_of(rank, groups)
    gates.mark("when it was made")
    wrapped = wrap(impl, kind, m, **group)
    # buffers() has those that state_dict() leaves out, too.
    start = [float(t.detach().flatten()[0]) for t in (*m.parameters(), *m.buffers())]
    gates.mark("in forward or backward")
    wrapped(values[rank]).backward()
    gates.mark("in finish_gradient_synchronization()")
    wrapped.finish_gradient_synchronization()
    return {"gradients": [p.grad for p in m.weights], "start": sorted(set(start))}


def transposed_views(impl, kind: str, values: PerRank) -> list:
    """Average gradients that are transposed views of one buffer; user code may set such a `.grad`."""
    local = values[dist.get_rank()]
    m = Given(local, 0)
    wrapped = wrap(impl, kind, m)
    buffer = torch.cat([v.t().flatten() for v in local])
    for p, v, piece in zip(m.weights, local, buffer.split([v.numel() for v in local]), strict=True):
        p.grad = piece.view(v.t().shape).t()
    wrapped.finish_gradient_synchronization()
    return [p.grad for p in m.weights]


def two_backwards(impl, kind: str, values: PerRank, options: dict) -> str:
    """Return the error of two backwards without no_sync() before one synchronization."""
    m = Given(values[dist.get_rank()], 0)
    m.unused = nn.Parameter(torch.zeros(2))  # its bucket does not fill up
    wrapped = wrap(impl, kind, m, **options)

    def step() -> None:
        for _ in range(2):
            wrapped(values[dist.get_rank()]).backward()
        wrapped.finish_gradient_synchronization()

    return raised(step)


class Given(nn.Module):
    """A model whose gradients are the inputs of forward. Weights and buffers start with the value `rank`."""

    def __init__(self, values: list, rank: int):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full_like(v, rank)) for v in values)
        self.register_buffer("place", torch.tensor(float(rank)))
        self.register_buffer("passing", torch.tensor(float(rank)), persistent=False)

    def forward(self, values: list) -> torch.Tensor:
        return sum((p * v).sum() for p, v in zip(self.weights, values, strict=True))
