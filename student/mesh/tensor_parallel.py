"""Provided: a tensor-parallel block, and a whole transformer, built from the modules of five exercises."""

import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Block, SwiGLU, Transformer
from lab.provided import provided

from .conjugates import Conjugate, copy_to, reduce_from
from .parallel_attention import ParallelAttention
from .parallel_linear import ColumnParallelLinear, ParallelSwiGLU, RowParallelLinear
from .sequence_parallel import gather_sequence, scatter_sequence
from .vocab_parallel import VocabParallelEmbedding, padded, vocab_parallel_cross_entropy


@provided
def conjugates(sequence: bool) -> tuple[Conjugate, Conjugate]:
    """(enter, leave) of a region; sequence: between regions each rank has a T-th of the tokens."""
    return (gather_sequence, scatter_sequence) if sequence else (copy_to, reduce_from)


@provided
def tensor_parallel_block(block: Block, group: dist.ProcessGroup | None = None, *, sequence: bool = False) -> Block:
    """`block`, whose attention and SwiGLU have been replaced by this rank's parts; its norms stay whole, and experts.

    With sequence, it takes and gives (batch, context / T, width); cos and sin are those of the whole context.
    """
    enter, leave = conjugates(sequence)
    block.attention = ParallelAttention(block.attention, group, enter, leave)  # type: ignore[assignment]
    if isinstance(block.mlp, SwiGLU):
        block.mlp = ParallelSwiGLU(block.mlp, group, enter, leave)  # type: ignore[assignment]
    return block


@provided
def tensor_parallel_ends(model: Transformer, group: dist.ProcessGroup | None = None, *, sequence: bool = False) -> None:
    """Replace embedding and head by this rank's parts of them; a head that is tied to the embedding stays so."""
    enter, leave = conjugates(sequence)
    tied = model.head.weight is model.embedding.weight
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(padded(model.head.weight, group), requires_grad=model.head.weight.requires_grad)
    model.head = ColumnParallelLinear(head, group, enter)  # type: ignore[assignment]
    model.embedding = VocabParallelEmbedding(model.embedding, group, leave)  # type: ignore[assignment]
    if tied:
        model.head.weight = model.embedding.weight


@provided
def tensor_parallel(
    model: Transformer, group: dist.ProcessGroup | None = None, *, sequence: bool = False
) -> Transformer:
    """`model`, alike on every rank, with all its parts replaced; the names of its parameters stay.

    It then gives this rank's columns of the logits, (batch, context, ⌈vocabulary / T⌉); its loss is
    `tensor_parallel_loss`. With sequence, the gradients of `partial_parameters` must be summed over the group.
    """
    for block in model.blocks:
        tensor_parallel_block(block, group, sequence=sequence)  # type: ignore[arg-type]
    tensor_parallel_ends(model, group, sequence=sequence)
    return model


@provided
def tensor_parallel_loss(
    model: Transformer, tokens: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the loss of the unsharded model, `model.loss(tokens, targets)`."""
    return vocab_parallel_cross_entropy(model(tokens), targets, group, vocabulary=model.config.vocabulary)


@provided
def tensor_dims(model: nn.Module) -> dict[str, int | None]:
    """By name of each parameter, the dim along which the tensor ranks have cut it; None: all ranks hold it whole."""
    dims: dict[str, int | None] = dict.fromkeys((name for name, _ in model.named_parameters()), None)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dims |= {f"{prefix}{own}": 0 for own, _ in module.named_parameters()}
        elif isinstance(module, RowParallelLinear):
            dims[f"{prefix}weight"] = 1
    return dims


@provided
def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that all tensor ranks hold whole; with sequence parallelism, gradients are of own tokens only."""
    dims = tensor_dims(model)
    return [parameter for name, parameter in model.named_parameters() if dims[name] is None]
