"""Run the pieces of tensor parallelism on each rank: forward, backward, what was sent and what was kept."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from torch import nn

from lab.measure.memory import Memory, meter
from lab.model.transformer import Config, Transformer
from lab.raising import raised
from lab.world.group import ledger


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
    looked at again afterwards. kept_bytes: what is alive beside the result when x is gone, and may be used in backward.
    """
    group, rank = group_of(groups), dist.get_rank()
    changed, out = [], {}
    layouts = {"": [t[rank].clone() for t in (x, dy)]}
    layouts["transposed "] = [t.mT.clone(memory_format=torch.contiguous_format).mT for t in layouts[""]]
    for layout, (x_, dy_) in layouts.items():
        before = x_.clone(), dy_.clone()
        x_.requires_grad_()
        first = len(ledger.rows)
        with meter([x_, before[0]]) as memory:
            passing = x_ * 1
            y = function(impl, name)(passing, group)
            same = torch.equal(passing, before[0])
            del passing
            kept = beside(memory, y)
            saved = memory.saved_bytes
        dx = torch.autograd.grad(y, x_, dy_)[0] if y.shape == dy_.shape else None
        changed += [layout + "x"] * (not same) + [layout + "dy"] * (not torch.equal(dy_, before[1]))
        rows = [row.plain() for row in ledger.rows[first:]]
        out = {"y": y.detach(), "dx": dx, "kept_bytes": max(saved, kept), "rows": rows}
    return {**out, "changed": changed}


def beside(memory: Memory, y: torch.Tensor) -> int:
    """Bytes alive that are not y's. Gloo's threads let go of a message's tensors a moment after it has come."""
    for _ in range(50):
        if (kept := memory.live_bytes - y.untyped_storage().nbytes()) <= 0:
            break
        time.sleep(0.005)
    return kept


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
    first = len(ledger.rows)
    y = layer(x)
    y.backward(dy[rank])
    return {
        "y": y.detach(),
        "dx": x.grad,
        "parameters": {name: p.detach() for name, p in layer.named_parameters()},
        "gradients": {name: p.grad for name, p in layer.named_parameters()},
        "rows": [row.plain() for row in ledger.rows[first:]],
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


def kept(impl, kind: str, sizes: dict) -> dict:
    """Bytes that are alive when a rank's part has been made and the whole is gone; and those of its parameters."""
    with meter() as memory:
        if kind in ("mlp", "attention"):
            part = region(impl, kind, Transformer(Config(**sizes)).blocks[0], None)
        else:
            shape = (sizes["rows"], sizes["columns"])
            part = made(impl, kind, torch.ones(shape), None if kind == "embedding" else torch.ones(shape[0]))
        gc.collect()
        live = memory.live_bytes
    return {"live_bytes": live, "parameters": {name: list(p.shape) for name, p in part.named_parameters()}}


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
    first = len(ledger.rows)
    with ledger.phase("forward"):
        y = part(x, *around)
    y.backward(dy)
    before = {name: p.grad.clone() for name, p in part.named_parameters()}
    if sequence:
        partial = impl.mesh.tensor_parallel.partial_parameters(part)
        with ledger.phase("finish"):
            impl.mesh.sequence_parallel.sum_partial_gradients(partial, group)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "parameters": {name: p.detach() for name, p in part.named_parameters()},
        "gradients": {name: p.grad for name, p in part.named_parameters()},
        "before": before,
        "norms": shapes,
        "rows": [row.plain() for row in ledger.rows[first:]],
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
            told.append(raised(lambda x=x: function(impl, "scatter_sequence")(x, None)))
        else:
            whole = Transformer(Config(**sizes)).blocks[0]
            told.append(raised(lambda kind=kind, whole=whole: region(impl, kind, whole, None)))
    return told


def embedding(impl, weight: torch.Tensor, tokens: torch.Tensor, dy: torch.Tensor, groups: list) -> dict:
    """A vocabulary-parallel embedding, forward and backward."""
    layer = made(impl, "embedding", weight, None, group_of(groups))
    first = len(ledger.rows)
    y = layer(tokens)
    y.backward(dy)
    return {
        "y": y.detach(),
        "parameters": {name: p.detach() for name, p in layer.named_parameters()},
        "gradient": layer.weight.grad,
        "rows": [row.plain() for row in ledger.rows[first:]],
    }


def cross_entropy(impl, logits: list, targets: torch.Tensor, vocabulary: int, scale: float, groups: list) -> dict:
    """The loss of this rank's columns, and the gradient of scale · loss."""
    group = group_of(groups)
    x = logits[dist.get_rank()].clone().requires_grad_()
    first = len(ledger.rows)
    with meter([x, targets]) as memory:
        with ledger.phase("forward"):
            loss = impl.mesh.vocab_parallel.vocab_parallel_cross_entropy(x, targets, group, vocabulary=vocabulary)
        (loss * scale).backward()
        largest = memory.largest_elements
    return {
        "loss": loss.detach(),
        "dlogits": x.grad,
        "largest_elements": largest,
        "rows": [row.plain() for row in ledger.rows[first:]],
    }


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
