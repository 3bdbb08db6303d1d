"""Probes for CS336 forks. They work like all other probes, on models of the kind that the course has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab.harness.layouts import lay_out
from lab.measure.kernels import watching
from lab.measure.memory import LiveStorages
from lab.ranks import gates
from lab.solution.wire import PerRank

if TYPE_CHECKING:  # ranks do not need it
    from lab.harness.trace import Trace

from ..zero.probes_fsdp import at_rest


def function(impl, kind: str):
    """The autograd function for tensors of (batch, length, dim). kind: "pytorch" or "triton"."""
    stage = impl.flash_attention
    return stage.tiled_forward.TiledAttention if kind == "pytorch" else stage.attention.FlashAttention


def attend(impl, kind: str, cases: list, is_causal: bool) -> list:
    """For each case (q, k, v, do): o, the tensors saved for backward, and forward's operators and kernel grids."""
    apply, found = function(impl, kind).apply, []
    for q, k, v, _ in cases:
        with watching() as seen:
            o = apply(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), is_causal)
        grids = [list(launch.grid) for launch in seen.launches]
        found.append({"o": o.detach(), "saved": saved(o), "operators": sorted(set(seen.operators)), "grids": grids})
    return found


def saved(o: Tensor) -> list[Tensor]:
    """Tensors that the function saved for backward, even if o is a view of the function's result."""
    node = o.grad_fn
    while node is not None and not hasattr(node, "saved_tensors") and node.next_functions:
        node = node.next_functions[0][0]
    return [t for t in getattr(node, "saved_tensors", ()) if isinstance(t, Tensor)]


def gradients(impl, kind: str, cases: list, is_causal: bool, layout: str = "contiguous") -> list:
    """dq, dk and dv for each case (q, k, v, do). layout: the memory layout of do."""
    apply, found = function(impl, kind).apply, []
    for q, k, v, do in cases:
        with watching():  # report a kernel that leaves its tensors, instead of crashing
            apply(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), is_causal).backward(lay_out(do, layout))
        found.append({"dq": q.grad, "dk": k.grad, "dv": v.grad})
    return found


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that one of these torch operators returns."""

    def __init__(self, names: list):
        super().__init__()
        self.names, self.seen = names, set[tuple[int, ...]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0].rstrip("_") in self.names and isinstance(out, Tensor):
            self.seen.add(tuple(out.shape))
        return out


def computed(impl, q: Tensor, k: Tensor, v: Tensor, names: list) -> dict:
    """o of the PyTorch version, and the shapes of tensors that operators with these names returned."""
    with Shapes(names) as shapes:
        o = function(impl, "pytorch").apply(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), False)
    return {"o": o.detach(), "shapes": sorted(shapes.seen)}


RESTING: set[int] = set()  # layers that Toy.forward skips on all ranks; global, as models take one argument


class Toy(nn.Module):
    """A perceptron with one frozen tensor and no buffers. tied: layers 1 and 3 share their weight."""

    def __init__(self, width: int, tied: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        if tied:
            self.layers[3].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i in RESTING else torch.tanh(layer(x))
        return x * self.scale


PHASES = ("forward", "backward", "finish")  # of a step


def wrapped(impl, kind: str, module: nn.Module, megabytes: float) -> nn.Module:
    if kind == "overlapped":
        return impl.ddp.overlapped.OverlappedDDP(module)
    return impl.ddp.bucketed.BucketedDDP(module, int(megabytes * (1 << 20)))


def train(
    impl, kind: str, tied: bool, states: PerRank, shares: PerRank, lr: float, megabytes: float, resting: list
) -> dict:
    """The state after training on this rank's shares, [rank][step] -> (x, y). The switch records when a PHASE begins.

    resting: layers to skip, per step. Train the wrapper's parameters, as the course's own tests do; the wrapper may
    have copied the model.
    """
    rank = dist.get_rank()
    m = Toy(shares[rank][0][0].shape[1], tied)
    m.load_state_dict(states[rank])
    model = wrapped(impl, kind, m, megabytes)
    parameters = [*model.parameters()] or [*m.parameters()]
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)
    for (x, y), layers in zip(shares[rank], resting, strict=True):
        RESTING.clear()
        RESTING.update(layers)
        optimizer.zero_grad()
        gates.mark("forward")
        loss = ((model(x) - y) ** 2).mean()
        gates.mark("backward")
        loss.backward()
        gates.mark("finish")
        model.finish_gradient_synchronization()
        optimizer.step()
    names = [name for name, _ in m.named_parameters()]
    return {"state": dict(zip(names, (p.detach() for p in parameters), strict=True))}


def by_phase(trace: Trace, steps: int, end: Sequence[str] = ()) -> dict[str, list[dict]]:
    """The messages of each phase, over all steps. end: names of the marks after the last step."""
    found: dict[str, list[dict]] = {phase: [] for phase in PHASES}
    for phase, rows in zip([*PHASES * steps, *end], trace.cut([*PHASES * steps, *end]), strict=True):
        found.setdefault(phase, []).extend(rows)
    return found


class Tokens(nn.Module):
    """Embedding and linear layers without bias, which CS336 shards, and norms that share one gain, which is whole."""

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


def train_sharded(impl, sizes: list, state: dict, batches: PerRank, lr: float, dtype: str) -> dict:
    """The full state after training on this rank's batches, [rank][step] -> (tokens, targets), and gradients' dtypes.

    The switch records when each PHASE begins, and the end.
    """
    m = Tokens(*sizes)
    m.load_state_dict(state)
    options = {"compute_dtype": torch.float16} if dtype == "float16" else {}
    model = (impl.zero.fsdp_mixed.FSDPMixed if options else impl.zero.fsdp_gather.FSDP)(m, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for tokens, targets in batches[dist.get_rank()]:
        optimizer.zero_grad()
        gates.mark("forward")
        out = model(tokens).float()
        gates.mark("backward")
        nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
        gates.mark("finish")
        model.finish_gradient_synchronization()
        optimizer.step()
    gates.mark("end")
    dtypes = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
    return {"state": {n: t.clone() for n, t in model.full_state().items()}, "dtypes": dtypes}


def bytes_held(impl, sizes: list, tokens: Tensor) -> dict:
    """Bytes of a sharded model: at rest, between forward and backward, and with gradients."""
    usage = {}
    with LiveStorages() as memory:
        model = impl.zero.fsdp_gather.FSDP(Tokens(*sizes))
        usage["rest"] = at_rest(memory)
        out = model(tokens).sum()
        usage["between"] = at_rest(memory)
        out.backward()
        del out
        model.finish_gradient_synchronization()
        usage["gradients"] = at_rest(memory)
    return usage
