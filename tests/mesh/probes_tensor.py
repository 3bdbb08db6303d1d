"""Runs the pieces of tensor parallelism on each rank, forward and backward, and measures what they keep."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.callers import changes
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


def conjugate(impl, name: str, x: list, dy: list, groups: list) -> dict:
    """One of the four functions, forward and backward, on this rank's x and gradient of the result.

    Both are handed in as they are made and, which is what comes back, with strides that are not the plain ones; each is
    looked at again afterwards.
    """
    group, rank = group_of(groups), dist.get_rank()
    changed, out = [], {}
    layouts = {"": [t[rank].clone() for t in (x, dy)]}
    layouts["transposed "] = [t.mT.clone(memory_format=torch.contiguous_format).mT for t in layouts[""]]
    for layout, (x_, dy_) in layouts.items():
        x_.requires_grad_()
        gates.mark(f"{layout}forward")
        passing = x_ * 1
        changes_since = changes(**{f"{layout}x": passing, f"{layout}dy": dy_})
        y = function(impl, name)(passing, group)
        gates.mark(f"{layout}backward")
        dx = torch.autograd.grad(y, x_, dy_)[0] if y.shape == dy_.shape else None
        changed += changes_since()
        out = {"y": y.detach(), "dx": dx}
    return {**out, "changed": changed}


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


def linear(impl, kind: str, weight: torch.Tensor, bias: torch.Tensor | None, x: list, dy: list, groups: list) -> dict:
    """A column- or row-parallel layer made from a whole one."""
    group, rank = group_of(groups), dist.get_rank()
    layer = made(impl, kind, weight, bias, group)
    x = x[rank].clone().requires_grad_()
    changed = changes(x=x, dy=dy[rank], **dict(layer.named_parameters()))
    gates.mark("forward")
    y = layer(x)
    gates.mark("backward")
    y.backward(dy[rank])
    return {
        "changed": changed(),
        "y": y.detach(),
        "dx": x.grad,
        "parameters": {name: p.detach() for name, p in layer.named_parameters()},
        "gradients": {name: p.grad for name, p in layer.named_parameters()},
    }


def made(impl, kind: str, weight: torch.Tensor, bias: torch.Tensor | None, group=None, **options):
    """The layer of this kind, from a whole nn.Linear or nn.Embedding with this weight."""
    if kind == "embedding":
        whole = nn.Embedding(*weight.shape, dtype=weight.dtype)
        whole.weight.data.copy_(weight)
        return impl.mesh.vocab_parallel.VocabParallelEmbedding(whole, group, **options)
    whole = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype)
    whole.weight.data.copy_(weight)
    if bias is not None:
        whole.bias.data.copy_(bias)
    names = {"column": "ColumnParallelLinear", "row": "RowParallelLinear"}
    return getattr(impl.mesh.parallel_linear, names[kind])(whole, group, **options)


def kept(impl, kind: str, sizes: dict, ballast: int) -> dict:
    """Make a rank's part of a whole layer of ones; then let the process grow by the ballast."""
    if kind in ("mlp", "attention"):
        part = region(impl, kind, ones(Transformer(Config(**sizes)).blocks[0]), None)
    else:
        shape = (sizes["rows"], sizes["columns"])
        part = made(impl, kind, torch.ones(shape), None if kind == "embedding" else torch.ones(shape[0]))
    return counted(part, ballast)


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
    part = region(impl, kind, model.blocks[0], group, sequence)
    if sequence:
        world, place = dist.get_world_size(group), dist.get_rank(group)
        x, dy = (t.chunk(world, 1)[place] for t in (x, dy))
    shapes: list = []
    for name, module in part.named_modules():
        if name.endswith("_norm"):
            module.register_forward_hook(lambda _, inputs, y: shapes.append([list(inputs[0].shape), list(y.shape)]))
    x = x.clone().requires_grad_()
    around = (model.cos[: sizes["context"]], model.sin[: sizes["context"]]) if kind != "mlp" else ()
    gates.mark("forward")
    y = part(x, *around)
    gates.mark("backward")
    y.backward(dy)
    gates.mark("finish")
    before = {name: p.grad.clone() for name, p in part.named_parameters()}
    if sequence:
        partial = impl.mesh.tensor_parallel.partial_parameters(part)
        impl.mesh.sequence_parallel.sum_partial_gradients(partial, group)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "parameters": {name: p.detach() for name, p in part.named_parameters()},
        "gradients": {name: p.grad for name, p in part.named_parameters()},
        "before": before,
        "norms": shapes,
    }


def refused(impl, cases: list) -> list:
    """What each part raises when the ranks do not divide it. case: [kind, sizes]."""
    told = []
    for kind, sizes in cases:
        if kind in ("column", "row"):
            weight = torch.ones(sizes["rows"], sizes["columns"])
            told.append(raised(lambda kind=kind, weight=weight: made(impl, kind, weight, None)))
        elif kind == "scatter_sequence":
            x = torch.ones(1, sizes["context"], 2)
            told.append(raised(lambda x=x: function(impl, "scatter_sequence")(x, None), text=True))
        else:
            whole = Transformer(Config(**sizes)).blocks[0]
            told.append(raised(lambda kind=kind, whole=whole: region(impl, kind, whole, None)))
    return told


def embedding(impl, weight: torch.Tensor, tokens: torch.Tensor, dy: torch.Tensor, groups: list) -> dict:
    """A vocabulary-parallel embedding, forward and backward."""
    layer = made(impl, "embedding", weight, None, group_of(groups))
    changed = changes(tokens=tokens, weight=layer.weight, dy=dy)
    gates.mark("forward")
    y = layer(tokens)
    gates.mark("backward")
    y.backward(dy)
    return {"y": y.detach(), "gradient": layer.weight.grad, "changed": changed()}


def cross_entropy(impl, logits: list, targets: torch.Tensor, vocabulary: int, scale: float, groups: list) -> dict:
    """The loss of this rank's columns, and the gradient of scale · loss."""
    group = group_of(groups)
    x = logits[dist.get_rank()].clone().requires_grad_()
    changed = changes(logits=x, targets=targets)
    gates.mark("forward")
    loss = impl.mesh.vocab_parallel.vocab_parallel_cross_entropy(x, targets, group, vocabulary=vocabulary)
    gates.mark("backward")
    (loss * scale).backward()
    return {"loss": loss.detach(), "dlogits": x.grad, "changed": changed()}


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
