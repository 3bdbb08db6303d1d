"""Bytes that autograd keeps for backward, found by walking the graph behind a result."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for backward. by_operation: {"MulBackward0": bytes}, by names of the graph's nodes that keep some."""

    total: int
    by_operation: dict[str, int]


def saved_bytes(output: Tensor, parameters: Iterable[Tensor] = ()) -> SavedBytes:
    """Return the bytes of the storages that the graph behind `output` keeps alive for backward.

    Start at the node `output.grad_fn` and follow `next_functions`. A node keeps the tensors in its attributes
    `_saved_…`, single or in a list; the node of a torch.autograd.Function keeps those in `saved_tensors`. Count the
    whole storage (`untyped_storage().nbytes()`) of a saved tensor, even if the tensor is a view of a part of it. Count
    each storage once, for the first operation among those that keep it (`_sequence_nr()` numbers nodes as they run).
    Leave out storages of `parameters`, which exist anyway. by_operation sums over nodes of the same name.
    Example: x.exp().sin() of 1,000 float32 numbers keeps 4,000 bytes: exp saves its result, sin saves its input, and
    both are the same storage.
    """
    seen = {p.untyped_storage().data_ptr() for p in parameters}
    by_operation: dict[str, int] = {}
    for node in sorted(_nodes(output.grad_fn), key=lambda node: node._sequence_nr()):
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                by_operation[node.name()] = by_operation.get(node.name(), 0) + storage.nbytes()
    return SavedBytes(sum(by_operation.values()), by_operation)


def _nodes(root: Any) -> set[Any]:
    """Every node of the graph behind root."""
    found, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return found


def _saved(node: Any) -> Iterator[Tensor]:
    """The tensors a node keeps."""
    # Only a Function's node has saved_tensors; the others have an attribute for each thing that they keep.
    kept = getattr(node, "saved_tensors", None)
    values = kept if kept is not None else [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
