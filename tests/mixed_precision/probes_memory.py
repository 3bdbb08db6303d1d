"""Probes of memory: graphs with a known number of saved bytes, and functions that count their calls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lab.harness.callers import CallerTensors
from lab.harness.calls import plain
from lab.harness.layouts import lay_out_all
from lab.measure.memory import meter
from lab.measure.process import weigh
from lab.model.transformer import Config, Transformer

from .probes_precision import DTYPES, SavedTracker

# ---- what autograd keeps ----


class Cube(torch.autograd.Function):
    """Saves its input twice: unchanged, and as a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x[..., :1])
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return gradient * 3 * x * x


# Operations on x (rows, width), some with a weight (width, width).
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, weight: x @ weight,
    "transposed": F.linear,
    "exp": lambda x, _: x.clamp(max=3).exp(),
    "softmax": lambda x, _: x.softmax(-1),
    "relu": lambda x, _: x.relu(),
    "in place": lambda x, _: (x + 1).relu_(),
    "square": lambda x, _: x * x,
    "norm": lambda x, _: F.layer_norm(x, x.shape[-1:]),
    "view": lambda x, _: torch.cat([x[:, ::2].sin(), x[:, 1::2].sin()], dim=1),
    "residual": lambda x, _: x + x.tanh(),
    "function": lambda x, _: Cube.apply(x),
    "index": lambda x, _: x[torch.arange(len(x)).flip(0)],  # saves a list of tensors
    "nothing": lambda x, _: (x + x).t().t(),
}


def graph(kinds: list[str], x: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A chain of OPERATIONS on x. The weights are its parameters; all but the first are views of one buffer."""
    x = x.clone().requires_grad_()
    buffer = torch.stack(weights)
    parameters = [w.clone().requires_grad_() for w in weights[:1]] + [w.requires_grad_() for w in buffer.unbind()[1:]]
    for kind, weight in zip(kinds, parameters, strict=True):
        x = OPERATIONS[kind](x, weight)
    return x, parameters


def saved(impl: Any, kinds: list[str], x: Tensor, weights: list[Tensor]) -> dict:
    output, parameters = graph(kinds, x, weights)
    return plain(impl.mixed_precision.saved_bytes.saved_bytes(output, parameters))


def saved_rows(impl: Any, kinds: list[str], x: Tensor, weights: list[Tensor]) -> list[dict]:
    """Everything that autograd nodes save: a row per tensor, in the order of execution. Does not call impl."""
    output, parameters = graph(kinds, x, weights)
    owned = {p.untyped_storage().data_ptr() for p in parameters}
    nodes: dict[int, Any] = {}
    todo = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and id(node) not in nodes:
            nodes[id(node)] = node
            todo += [n for n, _ in node.next_functions]
    rows, alive = [], []  # alive: keeps storages alive, so that addresses stay unique
    for node in sorted(nodes.values(), key=lambda n: n._sequence_nr()):
        names = [n for n in dir(node) if n.startswith("_saved_")]
        values = node.saved_tensors if "CubeBackward" in node.name() else [getattr(node, n) for n in names]
        for t in tree_leaves(list(values)):
            if isinstance(t, Tensor):
                alive.append(s := t.untyped_storage())
                row = {"operation": node.name(), "storage": s.data_ptr(), "size": s.nbytes(), "start": t.data_ptr()}
                rows.append({**row, "is_parameter": s.data_ptr() in owned})
    return rows


def model_saved(impl: Any, sizes: dict, batch: int, context: int) -> dict:
    """Result of saved_bytes for a transformer, and the bytes that hooks see, both without parameters."""
    model = Transformer(Config(**sizes))
    tokens = torch.randint(sizes["vocabulary"], (batch, context))
    tracker = SavedTracker([*model.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack):
        watched = model.loss(tokens, tokens)
    del watched
    loss = model.loss(tokens, tokens)
    got = impl.mixed_precision.saved_bytes.saved_bytes(loss, model.parameters())
    return {"total": int(got.total), "sum": sum(int(b) for b in got.by_operation.values()), "hooks": tracker.peak}


# ---- RMSNorm ----


def norm(
    impl: Any, x: Tensor, weight: Tensor, eps: float | None, dy: Tensor, needs: tuple[bool, bool], layouts: dict
) -> dict:
    """y, dx, dweight. eps None: the function's default. layouts: memory layouts of x, weight and dy.

    "given" in the result: whether backward itself returned a gradient for x and for weight.
    """
    x, weight, dy = (t.detach() for t in lay_out_all({"x": x, "weight": weight, "dy": dy}, layouts).values())
    x, weight = x.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
    caller = CallerTensors(x=x, weight=weight)
    y = impl.mixed_precision.rms_norm.RMSNorm.apply(x, weight, *([] if eps is None else [eps]))
    wanted = {name: t for name, t in (("dx", x), ("dweight", weight)) if t.requires_grad}
    results = {"y": y, "dx": None, "dweight": None, **caller.gradients([y], wanted, [dy]), "callers": caller.seen()}
    rerun = impl.mixed_precision.rms_norm.RMSNorm.apply(x, weight)  # keep the result: its graph lives as long
    raw = rerun.grad_fn.apply(dy) if hasattr(rerun.grad_fn, "apply") else ()  # also gradients that autograd would drop
    return {**results, "given": [g is not None for g in raw]}


def norm_memory(impl: Any, x: Tensor, weight: Tensor) -> dict:
    """Bytes saved besides the weight, bytes alive after forward besides y, names of y's node and the nodes after it."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    function = impl.mixed_precision.rms_norm.RMSNorm
    with meter(inputs=(x, weight)) as memory:
        y = function.apply(x, weight)
        alive = memory.live_bytes - y.untyped_storage().nbytes()
    nodes = str(y.grad_fn.name()), [f is not None and f.name() for f, _ in y.grad_fn.next_functions][:2]
    return {"saved": memory.saved_bytes - weight.nbytes, "alive": alive, "node": list(nodes)}


def norm_weighed(impl: Any, rows: int, width: int, dtype: str, seed: int, ballast: int) -> dict:
    """Some rows of x and y. weigh(ballast) puts the process's memory peak after forward."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, dtype=DTYPES[dtype]).requires_grad_()
    weight = torch.ones(width, dtype=x.dtype, requires_grad=True)
    y = impl.mixed_precision.rms_norm.RMSNorm.apply(x, weight)
    weigh(ballast)
    return {"x": x[:: max(1, rows // 4)].detach(), "y": y[:: max(1, rows // 4)].detach()}


# ---- checkpointing ----

NAMES = ("x", "the first weight", "the second weight", "the positional tensor", "the keyword tensor")


class Part(nn.Module):
    """Two layers and dropout; records its calls, the compute dtype, and whether autograd was on."""

    def __init__(self, weights: list[Tensor], rate: float):
        super().__init__()
        self.first, self.second = (nn.Parameter(w.clone()) for w in weights)
        self.rate = rate
        self.calls: list[list] = []

    def forward(self, x: Tensor, scale: Any = 1.0, *, shift: Tensor | None = None, flag: str = "") -> Any:
        hidden = F.dropout(x @ self.first, self.rate)
        self.calls.append([torch.is_grad_enabled(), str(hidden.dtype)])
        out = torch.tanh(hidden * scale) @ self.second
        if shift is not None:
            out = out + shift
        return (out, None, out.detach().mean(), x * 2) if flag == "many" else out


def _leaf(value: Any) -> Any:
    return value.clone().requires_grad_() if isinstance(value, Tensor) else value


def run_part(impl: Any, weights: list[Tensor], x: Tensor, options: dict) -> dict:
    """One forward and backward through a checkpointed part, or a plain one (options["how"])."""
    part, mode = Part(weights, options.get("rate", 0.0)), options["how"]
    call = (lambda f, *a, **k: f(*a, **k)) if mode == "plain" else impl.mixed_precision.checkpoint.checkpoint
    x = x.clone().requires_grad_(options.get("x_needs", True))
    scale, shift = _leaf(options.get("scale", 1.0)), _leaf(options.get("shift"))
    caller = CallerTensors(x=x, scale=scale, shift=shift)
    kind, extra = options.get("kind", "one"), torch.zeros(())  # extra: terms of the loss besides the result
    torch.manual_seed(7)
    autocast = torch.autocast("cpu", DTYPES.get(options.get("autocast")), enabled="autocast" in options)
    with autocast, torch.set_grad_enabled(kind != "no grad"):
        if kind == "many":
            out, nothing, mean, doubled = call(part, x, scale, shift=shift, flag="many")
            extra = doubled.sum() + mean.float()  # mean is detached
            assert nothing is None
            assert mean.dim() == 0
        elif kind == "nested":
            out = call(lambda y: call(part, call(part, y, scale), shift=shift), x)
        elif kind == "twice":
            out = call(lambda a, b: part(a) * b, x, x)  # one tensor in two places
        elif kind == "constants":
            rows, fixed = torch.arange(len(x)).flip(0), x.detach().clone()
            out = call(lambda a, rows, fixed: part(a[rows], shift=fixed), x, rows, fixed)
        elif kind == "history":
            derived = shift * 2  # the loss also depends on it directly
            out, extra = call(part, x, scale, shift=derived), derived.cos().sum()
        else:
            out = call(part, x, scale, shift=shift)
        loss = out.float().sin().sum() + extra
    if kind == "no grad":
        return {"out": out, "calls": part.calls, "graph": out.requires_grad}
    drawn, forward_calls, calls = torch.rand(3), len(part.calls), list[list]()
    leaves = dict(zip(NAMES, (x, part.first, part.second, scale, shift), strict=True))

    def backward() -> dict[str, Tensor | None]:
        leaf = {name: t for name, t in leaves.items() if isinstance(t, Tensor)}
        for t in leaf.values():
            t.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("backward_in") == "autocast"):
            loss.backward(retain_graph=True)
        return {f"gradient of {name}": t.grad for name, t in leaf.items()}

    grads = caller.twice(backward, again=lambda: calls.extend(part.calls))
    return {
        "out": out.detach(), "grads": [grads.get(f"gradient of {name}") for name in NAMES], "calls": calls,
        "between": drawn, "after": torch.rand(3), "in_forward": forward_calls, "callers": caller.seen(),
    }  # fmt: skip


def part_memory(impl: Any, weights: list[Tensor], x: Tensor, shift: Tensor, parts: int) -> dict:
    """Bytes of a chain of checkpointed parts: saved and alive after forward, and saved at most."""
    chain = [Part(weights, 0.1) for _ in range(parts)]
    parameters = [p for part in chain for p in part.parameters()]
    x, shift = x.clone().requires_grad_(), shift.clone()
    tracker = SavedTracker(parameters)
    with (
        meter(inputs=(x, shift, *parameters)) as memory,
        torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack),
    ):
        y = x
        for part in chain:
            y = impl.mixed_precision.checkpoint.checkpoint(part, y, shift=shift)
        after_forward, alive = tracker.live, memory.live_bytes
        y.sum().backward()
    return {"kept": after_forward, "alive": alive, "peak": tracker.peak}


def wide_part(impl: Any, weight: Tensor, x: Tensor, ballast: int) -> dict:
    """Column sums of a checkpoint's wide result, and x's gradient. weigh(ballast) puts the memory peak between both."""
    x = x.clone().requires_grad_()
    y = impl.mixed_precision.checkpoint.checkpoint(lambda a: torch.tanh(a @ weight), x)
    sums = y.detach().sum(0)
    weigh(ballast)
    y.sum().backward()
    return {"sums": sums, "gradient": x.grad}


# ---- plans ----


class Layer(nn.Module):
    """Maps rows of `size` numbers to rows of `next_size`, with `depth` operations that each save their result."""

    def __init__(self, size: int, next_size: int, depth: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, next_size) / size**0.5)
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight  # saves its input
        for _ in range(self.depth):
            x = torch.tanh(x)
        return x * 2.0  # saves nothing; its result is saved by the next layer


def chain_peak(impl: Any, rows: int, sizes: list[int], depths: list[int]) -> dict:
    """Plan a real chain by what its layers save, run it by that plan with torch's checkpoint, and measure the peak."""
    layers = [Layer(a, b, d) for a, b, d in zip(sizes, sizes[1:], depths, strict=False)]
    parameters = [p for layer in layers for p in layer.parameters()]
    inputs, saved, x = [], [], torch.randn(rows, sizes[0])
    for layer in layers:
        tracker = SavedTracker(parameters)
        with torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack):
            out = layer(x.detach().requires_grad_())
        inputs.append(x.nbytes)
        saved.append(tracker.peak)
        x = out.detach()
        del out
    plan = plain(impl.mixed_precision.checkpoint_plan.checkpoint_plan(inputs, saved))
    tracker = SavedTracker(parameters)
    x = torch.randn(rows, sizes[0], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack):
        start, y = 0, x
        for length in plan["segments"]:
            y = torch_checkpoint(nn.Sequential(*layers[start : start + length]), y, use_reentrant=True)
            start += length
        y.sum().backward()
    return {**plan, "inputs": inputs, "saved": saved, "measured": tracker.peak}
