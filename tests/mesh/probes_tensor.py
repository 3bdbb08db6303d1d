"""Runs the pieces of tensor parallelism on each rank, forward and backward, and measures what they keep."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from lab.harness.callers import CallerTensors
from lab.harness.layouts import lay_out_all
from lab.harness.raising import raised
from lab.measure.process import weigh
from lab.model.transformer import Config, SwiGLU, Transformer
from lab.ranks import gates

AGAIN = functools.partial(gates.mark, "again")


def group_of(groups: list):
    """Make groups of [[ranks], …]; return this rank's, or None, the default group, if the list is empty."""
    pairs = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in pairs if dist.get_rank() in ranks), None)


# ---- the four functions at which a region begins and ends ----


def function(impl, name: str):
    module = "sequence_parallel" if "sequence" in name else "conjugates"
    return getattr(getattr(impl.mesh, module), name)


def conjugate(impl, name: str, cases: list, groups: list) -> list:
    """Run one of the four functions forward and backward. cases: x and dy per rank, and their tensor layouts."""
    group, rank, results = group_of(groups), dist.get_rank(), []
    for operands, layouts in cases:
        x, dy = lay_out_all({n: operands[n][rank] for n in ("x", "dy")}, layouts).values()
        x = x.detach().requires_grad_()
        caller, view = CallerTensors(x=x, dy=dy), x.view_as(x)
        gates.mark("forward")
        y = function(impl, name)(view, group)
        gates.mark("backward")
        dx = caller.gradients([y], {"dx": x}, [dy], again=AGAIN)["dx"] if y.shape == dy.shape else AGAIN()
        results.append({"y": y.detach(), "dx": dx, "callers": caller.seen()})
    return results


def kept_for_backward(impl, name: str, elements: int, ballast: int) -> float:
    """Apply the function to ones, free input and result, raise the peak by the ballast; return the result's sum."""
    x = torch.ones(1, 2, elements // 2, requires_grad=True)
    y = function(impl, name)(x * 1, None)
    total, backward = float(y.detach().sum(dtype=torch.float64)), y.grad_fn
    del y
    weigh(ballast)
    return total if backward is not None else float("nan")


def shared(impl, name: str, x: list, other: list) -> torch.Tensor:
    """Return the gradient of an x that the loss also uses directly."""
    rank = dist.get_rank()
    local = x[rank].clone().requires_grad_()
    y = function(impl, name)(local, None)
    (y.square().sum() + (local * other[rank]).sum()).backward()
    return local.grad


# ---- layers ----


class Experts(nn.ModuleDict):
    """A layer's experts, by number."""

    def forward(self, tokens: torch.Tensor, counts: list) -> torch.Tensor:
        return torch.cat([e(part) for e, part in zip(self.values(), tokens.split(counts), strict=True)])


def full_layer(kind: str, sizes: dict) -> tuple[nn.Module, tuple]:
    """Build a whole layer of this kind; return it and its arguments besides x."""
    if kind in ("column", "row"):
        return nn.Linear(sizes["columns"], sizes["rows"], bias=sizes.get("bias", True)), ()
    if kind == "embedding":
        return nn.Embedding(sizes["rows"], sizes["columns"]), ()
    if kind == "experts":
        return Experts({str(n): SwiGLU(Config(**sizes["config"])) for n in sizes["numbers"]}), (sizes["counts"],)
    model = Transformer(Config(**sizes))
    block, tables = model.blocks[0], (model.cos[: sizes["context"]], model.sin[: sizes["context"]])
    return {"mlp": (block.mlp, ()), "attention": (block.attention, tables)}.get(kind, (block, tables))


PARALLEL = {
    "column": ("parallel_linear", "ColumnParallelLinear"),
    "row": ("parallel_linear", "RowParallelLinear"),
    "mlp": ("parallel_linear", "ParallelSwiGLU"),
    "attention": ("parallel_attention", "ParallelAttention"),
    "embedding": ("vocab_parallel", "VocabParallelEmbedding"),
    "experts": ("expert_tensor", "TensorParallelExperts"),
}
DEFAULTS = {"enter": "copy_to", "leave": "reduce_from"}
OPTIONS = {"column": ["enter"], "row": ["leave"], "mlp": [*DEFAULTS], "attention": [*DEFAULTS], "embedding": ["leave"]}


def parallel(impl, kind: str, layer: nn.Module, group, sequence: bool = False, **options) -> nn.Module:
    """Return this rank's part of a whole layer. options: its functions `enter` and `leave`."""
    if sequence:
        return impl.mesh.tensor_parallel.tensor_parallel_block(layer, group, sequence=True)
    if kind == "block":
        layer.attention = parallel(impl, "attention", layer.attention, group)
        layer.mlp = parallel(impl, "mlp", layer.mlp, group)
        return layer
    module, name = PARALLEL[kind]
    return getattr(getattr(impl.mesh, module), name)(layer, group, **options)


def part(impl, kind: str, sizes: dict, state: dict, x: list, dy: list, groups: list, layouts: dict,
         sequence: bool = False) -> dict:  # fmt: skip
    """Run a rank's part of a layer forward and backward. x, dy: one per rank. layouts: tensor layouts of both.

    In a group the part gets its functions `enter` and `leave`; "unused" lists those that forward did not call.
    """
    group, rank, used = group_of(groups), dist.get_rank(), []

    def recorder(name: str):
        return lambda x, group: used.append(name) or function(impl, DEFAULTS[name])(x, group)

    options = {name: recorder(name) for name in OPTIONS.get(kind, []) if groups}
    layer, extras = full_layer(kind, sizes)
    layer.load_state_dict(state)
    attended: list = []
    if kind == "attention":
        attend, config = layer.attend, layer.config
        layer.attend = lambda *args: attended.append(1) or attend(*args)
    shard = parallel(impl, kind, layer, group, sequence, **options)
    norms: list = []
    for name, module in shard.named_modules():
        if name.endswith("_norm"):
            module.register_forward_hook(lambda _, inputs, y: norms.append([list(inputs[0].shape), list(y.shape)]))
    x, dy = (t.detach() for t in lay_out_all({"x": x[rank], "dy": dy[rank]}, layouts).values())
    x.requires_grad_(x.is_floating_point())
    parameters = dict(shard.named_parameters())
    caller = CallerTensors(x=x, dy=dy, **parameters)
    gates.mark("forward")
    y = shard(x, *extras)
    unused = [name for name in options if name not in used]
    gates.mark("backward")
    wanted = {f"gradient of {name}": p for name, p in parameters.items()} | ({"dx": x} if x.requires_grad else {})
    found = caller.gradients([y], wanted, [dy], again=AGAIN)
    gates.mark("finish")
    for name, p in parameters.items():
        p.grad = found[f"gradient of {name}"]
    if sequence:
        partial = impl.mesh.tensor_parallel.partial_parameters(shard)
        impl.mesh.sequence_parallel.sum_partial_gradients(partial, group)
    return {
        "y": y.detach(), "dx": found.get("dx"), "callers": caller.seen(), "norms": norms, "unused": unused,
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items()},
        "attended": len(attended), "whole": kind == "attention" and shard.config == config,
    }  # fmt: skip


def of_ones(impl, kind: str, sizes: dict) -> nn.Module:
    """Return this rank's part of a layer whose parameters are all ones."""
    layer, _ = full_layer(kind, sizes)
    for p in layer.parameters():
        p.data.fill_(1.0)
    return parallel(impl, kind, layer, None)


def weighed_part(impl, kind: str, sizes: dict, ballast: int) -> dict:
    """Make this rank's part, then `weigh`, so that the memory peak shows how much the process holds."""
    part = of_ones(impl, kind, sizes)
    weigh(ballast)
    return {
        "parameters": {name: list(p.shape) for name, p in part.named_parameters()},
        "sums": {name: float(p.detach().sum(dtype=torch.float64)) for name, p in part.named_parameters()},
    }


def frozen(impl) -> dict:
    """Return [dtype, requires_grad] per parameter of this rank's parts of a frozen layer in bfloat16."""
    layer = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    parts = {kind: parallel(impl, kind, layer, None) for kind in ("column", "row")}
    named = ((f"{kind}, {name}", p) for kind, part in parts.items() for name, p in part.named_parameters())
    return {name: [str(p.dtype), p.requires_grad] for name, p in named}


def refused(impl, cases: list) -> list:
    """Return the error of making each part, as text. case: [kind, sizes]."""
    return [raised(lambda case=case: of_ones(impl, *case), text=True) for case in cases]


# ---- sequences and losses ----


def partial(impl, gradients: list) -> dict:
    """Sum partial gradients over ranks. gradients[rank]: a list, with None for no gradient."""
    local = gradients[dist.get_rank()]
    parameters = [nn.Parameter(torch.zeros(2) if g is None else torch.zeros_like(g)) for g in local]
    for p, g in zip(parameters, local, strict=True):
        p.grad = None if g is None else g.clone()
    before = [p.grad if p.grad is None else p.grad.data_ptr() for p in parameters]
    gates.mark("finish")
    impl.mesh.sequence_parallel.sum_partial_gradients((p for p in parameters), None)
    after = [p.grad if p.grad is None else p.grad.data_ptr() for p in parameters]
    return {"gradients": [p.grad for p in parameters], "in_place": before == after}


def scatter_refused(impl, lengths: list) -> list:
    """Return the error of scatter_sequence per sequence length, as text."""
    scatter = impl.mesh.sequence_parallel.scatter_sequence
    return [raised(lambda n=n: scatter(torch.ones(1, n, 2), None), text=True) for n in lengths]


def cross_entropy(
    impl, logits: list, targets: torch.Tensor, vocabulary: int, scale: float, groups: list, layouts: dict
) -> dict:
    """Return the loss from this rank's columns, and the gradient of scale · loss."""
    group = group_of(groups)
    x, targets = lay_out_all({"logits": logits[dist.get_rank()], "targets": targets}, layouts).values()
    x = x.detach().requires_grad_()
    caller = CallerTensors(logits=x, targets=targets)
    gates.mark("forward")
    loss = impl.mesh.vocab_parallel.vocab_parallel_cross_entropy(x, targets, group, vocabulary=vocabulary)
    gates.mark("backward")
    found = caller.gradients([loss], {"dlogits": x}, [torch.full_like(loss, scale)], again=AGAIN)
    return {"loss": loss.detach(), **found, "callers": caller.seen()}


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
