"""Runs the pieces of tensor parallelism on each rank, forward and backward, and measures what they keep."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.callers import Theirs
from lab.harness.layouts import all_laid
from lab.harness.raising import raised
from lab.measure.process import weigh
from lab.model.transformer import Config, Transformer
from lab.ranks import gates


def group_of(groups: list):
    """The group among these ([[ranks], …]) that this rank is in; the default one where there are none."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def function(impl, name: str):
    module = "sequence_parallel" if "sequence" in name else "conjugates"
    return getattr(getattr(impl.mesh, module), name)


def conjugate(impl, name: str, cases: list, groups: list) -> list:
    """One of the four functions, forward and backward. cases: x and dy per rank, and how they lie in memory."""
    group, rank, told = group_of(groups), dist.get_rank(), []
    for given, layouts in cases:
        x, dy = all_laid({n: given[n][rank] for n in ("x", "dy")}, layouts).values()
        x = x.detach().requires_grad_()
        theirs, passing = Theirs(x=x, dy=dy), x.view_as(x)
        gates.mark("forward")
        y = function(impl, name)(passing, group)
        gates.mark("backward")
        again = functools.partial(gates.mark, "again")
        dx = theirs.gradients([y], {"dx": x}, [dy], again=again)["dx"] if y.shape == dy.shape else again()
        told.append({"y": y.detach(), "dx": dx, "callers": theirs.seen()})
    return told


def kept_for_backward(impl, name: str, elements: int, ballast: int) -> float:
    """Sum the result of ones; then free x and the result, and let the process grow by the ballast."""
    x = torch.ones(1, 2, elements // 2, requires_grad=True)
    y = function(impl, name)(x * 1, None)
    total, backward = float(y.detach().sum(dtype=torch.float64)), y.grad_fn
    del y
    weigh(ballast)
    return total if backward is not None else float("nan")


def expanded(impl, name: str, x: list) -> torch.Tensor:
    """The gradient of the sum: torch hands one element, seen many times, to backward."""
    mine = x[dist.get_rank()].clone().requires_grad_()
    function(impl, name)(mine, None).sum().backward()
    return mine.grad


def shared(impl, name: str, x: list, other: list) -> torch.Tensor:
    """The gradient of an x that is used beside the function too."""
    rank = dist.get_rank()
    mine = x[rank].clone().requires_grad_()
    y = function(impl, name)(mine, None)
    (y.square().sum() + (mine * other[rank]).sum()).backward()
    return mine.grad


def through(part: nn.Module, inputs: dict, dy: torch.Tensor, *around: Any, layouts: dict | None = None) -> dict:
    """A part forward and backward. inputs: its first argument, by name; around: the others; layouts: of it and dy."""
    laid = all_laid({**inputs, "dy": dy}, layouts or {})
    x, dy = (t.detach() for t in laid.values())
    x.requires_grad_(x.is_floating_point())
    parameters = dict(part.named_parameters())
    theirs = Theirs(**dict.fromkeys(inputs, x), dy=dy, **parameters)
    gates.mark("forward")
    y = part(x, *around)
    gates.mark("backward")
    wanted = {f"gradient of {name}": p for name, p in parameters.items()} | ({"dx": x} if x.requires_grad else {})
    found = theirs.gradients([y], wanted, [dy], again=functools.partial(gates.mark, "again"))
    for name, p in parameters.items():
        p.grad = found[f"gradient of {name}"]
    return {
        "y": y.detach(),
        "dx": found.get("dx"),
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items()},
        "callers": theirs.seen(),
    }


def linear(
    impl, kind: str, weight: torch.Tensor, bias: torch.Tensor | None, x: list, dy: list, groups: list, layouts: dict
) -> dict:
    """A column- or row-parallel layer made from a whole one."""
    layer, rank = made(impl, kind, weight, bias, group_of(groups)), dist.get_rank()
    return through(layer, {"x": x[rank]}, dy[rank], layouts=layouts)


def embedding(impl, weight: torch.Tensor, tokens: torch.Tensor, dy: torch.Tensor, groups: list, layouts: dict) -> dict:
    """A vocabulary-parallel embedding."""
    layer = made(impl, "embedding", weight, None, group_of(groups))
    return through(layer, {"tokens": tokens}, dy, layouts=layouts)


KINDS = {
    "column": ("parallel_linear", "ColumnParallelLinear"),
    "row": ("parallel_linear", "RowParallelLinear"),
    "embedding": ("vocab_parallel", "VocabParallelEmbedding"),
}


def made(impl, kind: str, weight: torch.Tensor, bias: torch.Tensor | None, group=None):
    """The layer of this kind, from a whole nn.Linear or nn.Embedding with this weight."""
    rows, columns = weight.shape
    whole = nn.Embedding(rows, columns) if kind == "embedding" else nn.Linear(columns, rows, bias=bias is not None)
    whole.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    module, name = KINDS[kind]
    return getattr(getattr(impl.mesh, module), name)(whole, group)


def of_ones(impl, kind: str, sizes: dict) -> nn.Module:
    """A rank's part of a whole layer of ones."""
    if kind not in KINDS:
        return region(impl, kind, ones(Transformer(Config(**sizes)).blocks[0]), None)
    shape = (sizes["rows"], sizes["columns"])
    return made(impl, kind, torch.ones(shape), None if kind == "embedding" else torch.ones(shape[0]))


def kept(impl, kind: str, sizes: dict, ballast: int) -> dict:
    """Make a rank's part; then let the process grow by the ballast."""
    return counted(of_ones(impl, kind, sizes), ballast)


def ones(whole: nn.Module) -> nn.Module:
    for p in whole.parameters():
        p.data.fill_(1.0)
    return whole


def counted(part: nn.Module, ballast: int) -> dict:
    """Let the process grow by the ballast, so that its peak shows what it holds now; return shapes and sums."""
    weigh(ballast)
    return {
        "parameters": {name: list(p.shape) for name, p in part.named_parameters()},
        "sums": {name: float(p.detach().sum(dtype=torch.float64)) for name, p in part.named_parameters()},
    }


def region(impl, kind: str, block: nn.Module, group, sequence: bool = False) -> nn.Module:
    """The mlp, the attention or the whole of a block, tensor-parallel."""
    if kind == "mlp":
        return impl.mesh.parallel_linear.ParallelSwiGLU(block.mlp, group)
    if kind == "attention":
        return impl.mesh.parallel_attention.ParallelAttention(block.attention, group)
    if sequence:
        return impl.mesh.tensor_parallel.tensor_parallel_block(block, group, sequence=True)
    block.attention = impl.mesh.parallel_attention.ParallelAttention(block.attention, group)
    block.mlp = impl.mesh.parallel_linear.ParallelSwiGLU(block.mlp, group)
    return block


def block(impl, kind: str, sizes: dict, state: dict, x: torch.Tensor, dy: torch.Tensor, groups: list,
          sequence: bool = False) -> dict:  # fmt: skip
    """A block, or a region of it, forward and backward; with sequence, on this rank's tokens of x and dy."""
    group = group_of(groups)
    model = Transformer(Config(**sizes))
    model.load_state_dict(state)
    attention, attended = model.blocks[0].attention, []
    attend, config = attention.attend, attention.config

    def count(*args) -> torch.Tensor:
        attended.append(1)
        return attend(*args)

    attention.attend = count
    part = region(impl, kind, model.blocks[0], group, sequence)
    if sequence:
        world, place = dist.get_world_size(group), dist.get_rank(group)
        x, dy = (t.chunk(world, 1)[place] for t in (x, dy))
    shapes: list = []
    for name, module in part.named_modules():
        if name.endswith("_norm"):
            module.register_forward_hook(lambda _, inputs, y: shapes.append([list(inputs[0].shape), list(y.shape)]))
    around = (model.cos[: sizes["context"]], model.sin[: sizes["context"]]) if kind != "mlp" else ()
    told = through(part, {"x": x}, dy, *around)
    gates.mark("finish")
    before = {name: p.grad.clone() for name, p in part.named_parameters()}
    if sequence:
        partial = impl.mesh.tensor_parallel.partial_parameters(part)
        impl.mesh.sequence_parallel.sum_partial_gradients(partial, group)
    gradients = {name: p.grad for name, p in part.named_parameters()}
    told |= {"attended": len(attended), "whole": kind == "attention" and part.config == config}
    return {**told, "gradients": gradients, "before": before, "norms": shapes}


def partial(impl, gradients: list) -> dict:
    """Sum given gradients, of which this rank has its own; None for none."""
    own = gradients[dist.get_rank()]
    parameters = [nn.Parameter(torch.zeros(2) if g is None else torch.zeros_like(g)) for g in own]
    for p, g in zip(parameters, own, strict=True):
        p.grad = None if g is None else g.clone()
    before = [p.grad if p.grad is None else p.grad.data_ptr() for p in parameters]
    gates.mark("finish")
    impl.mesh.sequence_parallel.sum_partial_gradients((p for p in parameters), None)
    after = [p.grad if p.grad is None else p.grad.data_ptr() for p in parameters]
    return {"gradients": [p.grad for p in parameters], "in_place": before == after}


def frozen(impl) -> dict:
    """[dtype, requires_grad] of each parameter of the parts of a frozen layer in bfloat16."""
    linear, whole = impl.mesh.parallel_linear, nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    parts = {"column": linear.ColumnParallelLinear(whole), "row": linear.RowParallelLinear(whole)}
    named = ((f"{kind}, {name}", p) for kind, part in parts.items() for name, p in part.named_parameters())
    return {name: [str(p.dtype), p.requires_grad] for name, p in named}


def refused(impl, cases: list, text: bool = False) -> list:
    """What each part raises when the ranks do not divide it. case: [kind, sizes]."""
    return [raised(lambda case=case: of_ones(impl, *case), text) for case in cases]


def scatter_refused(impl, lengths: list) -> list:
    """What sequences of these lengths raise when the ranks do not divide them, as text."""
    scatter = impl.mesh.sequence_parallel.scatter_sequence
    return [raised(lambda n=n: scatter(torch.ones(1, n, 2), None), text=True) for n in lengths]


def cross_entropy(
    impl, logits: list, targets: torch.Tensor, vocabulary: int, scale: float, groups: list, layouts: dict
) -> dict:
    """The loss of this rank's columns, and the gradient of scale · loss."""
    group = group_of(groups)
    x, targets = all_laid({"logits": logits[dist.get_rank()], "targets": targets}, layouts).values()
    x = x.detach().requires_grad_()
    theirs = Theirs(logits=x, targets=targets)
    gates.mark("forward")
    loss = impl.mesh.vocab_parallel.vocab_parallel_cross_entropy(x, targets, group, vocabulary=vocabulary)
    gates.mark("backward")
    again = functools.partial(gates.mark, "again")
    found = theirs.gradients([loss], {"dlogits": x}, [torch.full_like(loss, scale)], again=again)
    return {"loss": loss.detach(), **found, "callers": theirs.seen()}


def large_loss(impl, tokens: int, columns: int, seed: int) -> dict:
    """Draw large logits on each rank; return the loss, and the gradient summed over the rank's columns."""
    vocabulary = columns * dist.get_world_size()
    x = logits_of(tokens, columns, seed, dist.get_rank()).requires_grad_()
    targets = targets_of(tokens, vocabulary, seed)
    loss = impl.mesh.vocab_parallel.vocab_parallel_cross_entropy(x, targets, vocabulary=vocabulary)
    loss.backward()
    return {"loss": loss.detach(), "sums": x.grad.sum(-1)}


def logits_of(tokens: int, columns: int, seed: int, rank: int) -> torch.Tensor:
    return torch.randn(1, tokens, columns, generator=torch.Generator().manual_seed(seed + rank))


def targets_of(tokens: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))


def model(impl, sizes: dict, state: dict, batches: list, groups: list, sequence: bool, tied: bool) -> dict:
    """A whole transformer: the mean loss of some micro-batches and its gradients."""
    group = group_of(groups)
    whole = Transformer(Config(**sizes))
    whole.load_state_dict(state)
    if tied:
        whole.head.weight = whole.embedding.weight
    given = impl.mesh.tensor_parallel
    part = given.tensor_parallel(whole, group, sequence=sequence)
    losses = []
    for tokens, targets in batches:
        loss = given.tensor_parallel_loss(part, tokens, targets, group)
        losses.append(loss.detach())
        (loss / len(batches)).backward()
    if sequence:
        impl.mesh.sequence_parallel.sum_partial_gradients(given.partial_parameters(part), group)
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in part.named_parameters()},
        "dims": [[name, dim] for name, dim in given.tensor_dims(part).items()],
    }
