"""Probes of sharded models: train a net on each rank, or measure the memory that it holds."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lab.harness import modes
from lab.harness.calls import plain
from lab.harness.named import Named, Numbered
from lab.harness.raising import raised
from lab.measure.memory import LiveStorages
from lab.measure.process import lowest_bytes, weigh
from lab.ranks import gates
from lab.solution.wire import PerRank

from ..ddp.probes import group_of

METHODS = ["message", "start", "gather", "free", "before_forward", "before_backward", "reduce"]  # some are overridden
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Block(Named):
    """A residual layer, with gates before and after it in forward, and one between its halves in backward."""

    def __init__(self, width: int, hidden: int, double: bool, index: int):
        super().__init__(
            (width, hidden),
            up=nn.Linear(width, hidden),
            down=nn.Linear(hidden, width, bias=False),
            shift=nn.Parameter(torch.zeros(width, dtype=torch.float64 if double else torch.float32)),
        )
        self.index, self.prefix = index, ""

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> dict:
        x = _gate_in_forward(x, self.prefix, f"block {self.index} begins")
        h = _gate_in_backward(torch.tanh(self.up(x)), self.prefix, f"block {self.index} backward")
        y = x + self.down(h) * gain + self.shift.to(x.dtype)
        return {"y": _gate_in_forward(y, self.prefix, f"block {self.index} ends"), "unused": None}


def _gate_in_forward(x: torch.Tensor, prefix: str, name: str) -> torch.Tensor:
    return gates.in_forward(x, f"{prefix} {name}") if prefix else x


def _gate_in_backward(x: torch.Tensor, prefix: str, name: str) -> torch.Tensor:
    return gates.in_backward(x, f"{prefix} {name}") if prefix else x


class Net(Named):
    """Map tokens to logits. plan, its configuration: width, hidden (per block), vocabulary; flags: tied, checkpoint,
    frozen, double. `begin` sets the prefix of gate names, the step and micro-batch ("": no gates). Gates of forward:
    "0.1 embedded", "0.1 block 2 begins", "0.1 block 2 ends"; of backward: "0.1 blocks", "0.1 block 2 backward".
    """

    def __init__(self, plan: dict):
        width, vocabulary, double = plan["width"], plan["vocabulary"], plan.get("double", False)
        seed, blocks = (vocabulary, plan["hidden"]), [Block(width, h, double, i) for i, h in enumerate(plan["hidden"])]
        super().__init__(
            seed,
            embedding=nn.Embedding(vocabulary, width),
            shift=nn.Parameter(torch.zeros(width)),  # belongs to no layer
            blocks=Numbered(seed, blocks),
            norm=nn.LayerNorm(width),
            head=nn.Linear(width, vocabulary, bias=False),
        )
        self.checkpoint, self.prefix = plan.get("checkpoint", False), ""
        if plan.get("tied"):
            self.head.weight = self.embedding.weight
        if plan.get("frozen"):
            self.blocks[1].requires_grad_(False)
            self.blocks[0].up.requires_grad_(False)
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("passing", torch.zeros(width), persistent=False)  # not in state_dict()
        self.gathered_units: list[list[list[str]]] = []  # per backward: gathered units before it and after it

    def finish_gradient_synchronization(self) -> None:
        """Do nothing: the net itself (for ZeRO2) needs no synchronization."""

    def full_state(self) -> dict:
        return nn.Module.state_dict(self)

    def begin(self, prefix: str) -> None:
        self.prefix = prefix
        for block in self.blocks:
            block.prefix = prefix

    def forward(self, tokens: torch.Tensor, order: list) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x * self.scale.to(x.dtype) + (self.shift + self.passing).to(x.dtype)
        x = _gate_in_forward(x, self.prefix, "embedded")
        for i in order:
            block = self.blocks[i]
            x = (checkpoint(block, x, gain=0.5, use_reentrant=False) if self.checkpoint else block(x, gain=0.5))["y"]
        return self.head(self.norm(_gate_in_backward(x, self.prefix, "blocks")))


def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error, in float32 for 16-bit outputs."""
    out = out.float() if out.dtype in (torch.float16, torch.bfloat16) else out
    return ((out - targets.to(out.dtype)) ** 2).mean()


def wrap(impl, kind: str, m: nn.Module, **options: Any) -> Any:
    """Return the sharded model of this kind. An option may be the name of a dtype, or "blocks": the list of blocks."""
    named = {**DTYPES, "blocks": [*getattr(m, "blocks", ())]}
    options = {k: named[v] if isinstance(v, str) else v for k, v in options.items()}
    name = {"gather": "FSDP", "prefetch": "FSDPPrefetch", "mixed": "FSDPMixed"}[kind]
    return getattr(getattr(impl.zero, f"fsdp_{kind}"), name)(m, **options)


def build(impl, kind: str, m: Net, optim: list, **options: Any) -> tuple:
    """Return (model, optimizer): for "zero2" the net itself and ZeRO2, else a sharded model and torch's optimizer."""
    if kind == "zero2":
        return m, optimizer(optim[0], m, optim[1], partial(impl.zero.zero2.ZeRO2, **options))
    wrapped = wrap(impl, kind, m, **options)
    return wrapped, optimizer(optim[0], list(wrapped.parameters()), optim[1])


def optimizer(name: str, parameters: Any, lr: float, factory: Any = None) -> Any:
    """Return torch's optimizer, or factory(parameters, torch's class, **options) if there is a factory."""
    cls, options = {
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
        "adamw": (torch.optim.AdamW, {"eps": 1e-3, "weight_decay": 0.1}),
    }[name]
    return factory(parameters, cls, lr=lr, **options) if factory else cls(parameters, lr=lr, **options)


def train(impl, kind: str, options: dict, plan: dict, states: PerRank, batches: PerRank, optim: list) -> dict:
    """Train on batches[rank][step][micro-batch]: [tokens, targets, order]. optim: [name, lr].

    With an odd number of ranks the net is in evaluation mode.
    """
    rank = dist.get_rank()
    m = Net(plan)
    m.load_state_dict(states[rank])
    m.passing.fill_(rank != 0)
    changed = modes.put(m, training=dist.get_world_size() % 2 == 0)
    wrapped, stepper = build(impl, kind, m, optim, **options)
    layer_counts = count_layers(wrapped, m)
    start = plain_state(wrapped)
    dtypes, losses, evaluated, full_gradients, unfreed = [], [], [], [], []
    for number, step in enumerate(batches[rank]):
        stepper.zero_grad()
        for i, (tokens, targets, order) in enumerate(step):
            losses.append(backward(wrapped, m, f"{number}.{i}", tokens, targets, order, len(step)))
        full_gradients.append(sorted(n for n, p in m.named_parameters() if p.grad is not None))
        gates.mark(f"{number} finish")
        wrapped.finish_gradient_synchronization()
        unfreed.append(len(gathered_units(wrapped)))
        dtypes.append(sorted({str(p.grad.dtype) for p in wrapped.parameters() if p.grad is not None}))
        gates.mark(f"{number} step")
        stepper.step()
        gates.mark(f"{number} no_grad")
        m.begin("")
        with torch.no_grad():
            evaluated.append(wrapped(step[0][0], step[0][2]).float())
        gates.mark(f"{number} over")
    return {"state": plain_state(wrapped), "start": start, "losses": losses, "evaluated": evaluated, "dtypes": dtypes,
            "left": full_gradients, "elements": sum(p.numel() for p in wrapped.parameters()), "held": m.gathered_units,
            "most": max(layer_counts, default=0), "modes": changed(), "unfreed": unfreed}  # fmt: skip


def backward(
    wrapped: Any, m: Net, prefix: str, tokens: torch.Tensor, targets: torch.Tensor, order: list, micro_batches: int
) -> float:
    """Run forward and backward of one of `micro_batches` micro-batches; return its loss."""
    m.begin(prefix)
    gates.mark(f"{prefix} forward")
    out = loss(wrapped(tokens, order=order), targets)
    before = [gathered_units(wrapped)]
    gates.mark(f"{prefix} backward")
    (out / micro_batches).backward()
    m.gathered_units.append([*before, gathered_units(wrapped)])
    return float(out.detach())


def gathered_units(wrapped: Any) -> list[str]:
    """Return "trained" or "frozen" per unit that is gathered now, or whose parameters are attributes of a module."""
    return [
        "trained" if unit.shard.requires_grad else "frozen" for unit in getattr(wrapped, "units", ())
        if unit.full.untyped_storage().nbytes() or any(n in vars(m) for places in unit.places for m, n in places)
    ]  # fmt: skip


def count_layers(wrapped: Any, m: Net) -> list[int]:
    """Return a list that training fills: the number of gathered layers, each time a block computes."""
    counts: list[int] = []

    def count(*_: Any) -> None:
        layers = reversed([*getattr(wrapped, "units_of", {}).items()])
        owners = {unit: layer for layer, units in layers for unit in units}  # shared: the first layer
        counts.append(len({layer for unit, layer in owners.items() if unit.full.untyped_storage().nbytes()}))

    def computes(_: nn.Module, x: tuple) -> None:
        count()
        if x[0].requires_grad:
            x[0].register_hook(count)

    for block in m.blocks:
        block.down.register_forward_pre_hook(computes)
    return counts


def plain_state(wrapped: Any) -> dict:
    return {str(n): t.detach().clone() for n, t in wrapped.full_state().items()}


class Dot(nn.Module):
    def __init__(self, value: torch.Tensor, fill: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.full_like(value, fill))
        self.register_buffer("place", torch.tensor(float(fill)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def gradients(impl, kind: str, options: dict, values: PerRank, groups: list) -> dict:
    """Average given gradients over this rank's group: in a sharded layer ("cut"), and in an unsharded one ("whole")."""
    rank = dist.get_rank()
    group = group_of(rank, groups)
    if kind == "zero2":
        return zero2_mean(impl, values[rank], rank, group, **options)
    results = {}
    for name, small in (("cut", 0), ("whole", 1 << 20)) if kind != "mixed" else (("cut", None),):
        m = nn.Sequential(Dot(values[rank].float() if kind == "mixed" else values[rank], rank))  # masters are float32
        arguments = options if small is None else {**options, "small": small}
        wrapped = wrap(impl, kind, m, **arguments, **group)
        for method in METHODS:
            setattr(wrapped, method, Mock(wraps=getattr(wrapped, method)))
        wrapped(values[rank]).backward()
        wrapped.finish_gradient_synchronization()
        (parameter,) = wrapped.parameters()
        results[name] = parameter.grad
        results[f"{name} start"] = starts(wrapped.full_state())
        results[f"{name} called"] = [method for method in METHODS if getattr(wrapped, method).called]
    return results


def starts(state: dict) -> dict[str, int]:
    return {n: int(t.flatten()[0]) for n, t in state.items()}


def zero2_mean(impl, value: torch.Tensor, start: int, group: dict, dropped: float = 0.0) -> dict:
    """Return "whole", the mean gradient: one step of ZeRO2 with SGD subtracts it from the weight. A scheduler doubles
    the inner optimizer's rate to 1. dropped: compute `dropped` times the gradient before; zero_grad() clears it.
    """
    m = Dot(value, start)
    zero = impl.zero.zero2.ZeRO2(m, torch.optim.SGD, lr=0.5, **group)
    torch.optim.lr_scheduler.LambdaLR(zero.optimizer, lambda _: 2.0)
    result = {"whole start": starts(m.state_dict()), "whole": m.weight.detach().clone()}
    if dropped:
        m(dropped * value).backward()
        zero.zero_grad()
    m(value).backward()
    zero.step()
    return {**result, "whole": result["whole"] - m.weight.detach()}


def nested(impl) -> str:
    """Return the name of the error for nested layers."""
    m = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    return raised(lambda: wrap(impl, "gather", m, layers=[m[1], m[0], m[0][0]]))


def two_names(impl) -> list[dict]:
    """Register a layer twice; return [state of the model, state of its wrapper]."""
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    m.append(m[0])
    state = plain(nn.Module.state_dict(m))
    return [state, plain_state(wrap(impl, "gather", m, small=0))]


class Keywords(nn.Module):
    """A layer that takes tensors by position, by keyword and in containers, and records their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 3), list[str]()

    def forward(self, x: torch.Tensor, pair: tuple, *, named: dict) -> torch.Tensor:
        tensors = (x, *pair, *named["some"])
        self.seen += [str(t.dtype).removeprefix("torch.") for t in tensors]
        return self.layer(x)


def cast_arguments(impl, dtype: str) -> list[str]:
    """Call a model with four float32 tensors and an int64 tensor; return the dtypes that its forward gets."""
    m = Keywords()
    wrapped = wrap(impl, "mixed", m, compute_dtype=dtype)
    ones = torch.ones(2, 3)
    wrapped(ones, (ones, ones), named={"some": [ones, torch.ones(2, 3, dtype=torch.int64)]})
    return m.seen


def at_rest(memory: LiveStorages) -> int:
    """Return the bytes held now. Gloo's threads keep their last message until the next; so send some barriers first."""
    for _ in range(8):
        dist.barrier()
    return lowest_bytes(memory.now, patience_s=0.015)


def held_bytes(impl, kind: str, options: dict, plan: dict, tokens: torch.Tensor) -> dict:
    """Return bytes in the second step with AdamW: "rest" (before it), the peak of "forward", "between" forward and
    backward, the peak of "backward", and "gradients" (after it)."""
    sizes = {}
    order = list(range(len(plan["hidden"])))
    with LiveStorages() as memory:
        wrapped, stepper = build(impl, kind, Net(plan), ["adamw", 0.01], **options)
        for _ in range(2):
            stepper.zero_grad()
            sizes["rest"] = at_rest(memory)
            memory.restart()
            out = wrapped(tokens, order).sum()
            sizes["forward"], sizes["between"] = memory.peak, at_rest(memory)
            memory.restart()
            out.backward()
            sizes["backward"] = memory.peak
            del out
            wrapped.finish_gradient_synchronization()
            stepper.step()
            sizes["gradients"] = at_rest(memory)
    return sizes


def weighed(impl, kind: str, plan: dict, seed: int, tokens: list, moment: str, ballast: int, steps: int) -> dict:
    """Train with SGD; at `moment` of the last step, `weigh(ballast)` makes the memory peak show the bytes held then.

    moment: "forward" (in the last block), "backward" (in the first block), or "gradients" (after the step). Returns the
    loss, and the sum over rows of each tensor of the state. tokens: per rank.
    """
    torch.manual_seed(seed)
    m = Net(plan)
    wrapped, stepper = build(impl, kind, m, ["sgd", 0.1])

    def reach(now: str) -> None:
        if now == moment and last:
            weigh(ballast)

    m.blocks[-1].down.register_forward_pre_hook(lambda *_: reach("forward"))
    m.blocks[0].down.register_forward_pre_hook(lambda _, x: x[0].register_hook(lambda _: reach("backward")) and None)
    for step in range(steps):
        last = step == steps - 1
        stepper.zero_grad()
        out = loss(wrapped(tokens[dist.get_rank()], list(range(len(plan["hidden"])))), torch.zeros(()))
        value = float(out.detach())
        out.backward()
        wrapped.finish_gradient_synchronization()
        stepper.step()
        del out
    reach("gradients")
    return {"loss": value, "sums": {n: t.double().sum(0) for n, t in wrapped.full_state().items()}}
