"""What autograd keeps for backward: found by walking the graph behind a result."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for backward. by_operation: {"MulBackward0": bytes}, by names of the graph's nodes that keep some."""

    total: int
    by_operation: dict[str, int]


def saved_bytes(output: Tensor, parameters: Iterable[Tensor] = ()) -> SavedBytes:
    """Bytes of the storages that the graph behind `output` keeps alive for its backward.

    A node of the graph (`output.grad_fn`, and on through `next_functions`) keeps the tensors in its attributes
    `_saved_…`, alone or in a list; the node of a torch.autograd.Function those in `saved_tensors`. What counts is the
    whole storage (`untyped_storage().nbytes()`) of a saved tensor, though it may be a view of a part; each storage
    counts once, for the operation that ran first among those that keep it (nodes are numbered as they run:
    `_sequence_nr()`). Storages of `parameters` are left out: they
    are there anyway. by_operation sums over nodes of one name.
    x.exp().sin() of 1,000 float32 numbers keeps 4,000 bytes once: exp its result, sin its input, the same storage.
    """
    raise NotImplementedError(
        "mixed_precision.saved_bytes: Bytes of the storages that the graph behind `output` keeps alive for its backward"
    )
