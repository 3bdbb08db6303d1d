"""Probes that clip given gradients, or count given targets, on each rank."""

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.measure.reads import reads
from lab.ranks import gates
from lab.solution.wire import PerRank

from .probes import group_of, parameters_of

FIELDS = ("samples", "tokens", "global_batch", "global_tokens")


def clip(impl, cases: list) -> list:
    """Clip in a process without ranks. case: "max_norm", "gradients" (None: no gradient), "given" (see _in_form)."""
    return [_clipped(impl, case, {}) for case in cases]


def clip_sharded(impl, cases: PerRank, groups: list) -> list:
    """cases[rank]: cases as in `clip`, each also with "sharded": gradients of shards. groups: see `group_of`."""
    rank = dist.get_rank()
    options, results = group_of(rank, groups), []
    for i, case in enumerate(cases[rank]):
        gates.mark(f"case {i}")
        results.append(_clipped(impl, case, options))
    return results


def _clipped(impl, case: dict, options: dict) -> dict:
    """Clip gradients that are views of one buffer per dtype, as wrappers leave them. "reads": what Python has read."""
    whole_gradients, shard_gradients, form = case["gradients"], case.get("sharded"), case.get("given", "list")
    everything = _parameters([*whole_gradients, *(shard_gradients or [])])
    before = [None if p.grad is None else p.grad.data_ptr() for p in everything]
    parameters, shard_parameters = everything[: len(whole_gradients)], everything[len(whole_gradients) :]
    if shard_gradients is not None:
        options = {**options, "sharded": _in_form(shard_parameters, form)}
    passed = _in_form(parameters, form)
    with reads() as read:
        norm = impl.ddp.clip_and_count.clip_gradient_norm(passed, case["max_norm"], **options)
    after = [None if p.grad is None else p.grad.data_ptr() for p in everything]
    return {
        "norm": norm if isinstance(norm, torch.Tensor) else torch.tensor(float(norm)),
        "returned": f"{norm.dtype} {tuple(norm.shape)}" if isinstance(norm, torch.Tensor) else type(norm).__name__,
        "gradients": [None if p.grad is None else p.grad.clone() for p in everything],
        "in_place": before == after,
        "reads": sorted(read),
    }


def _in_form(parameters: list, form: str):
    return {"list": parameters, "generator": (p for p in parameters), "twice": [*parameters, *parameters]}[form]


def _parameters(gradients: list) -> list:
    parameters = parameters_of(gradients)
    for dtype in {g.dtype for g in gradients if g is not None}:
        same_dtype = [p for p in parameters if p.grad is not None and p.dtype == dtype]
        buffer = torch.cat([p.grad.flatten() for p in same_dtype])
        for p, piece in zip(same_dtype, buffer.split([p.numel() for p in same_dtype]), strict=True):
            p.grad = piece.view_as(p)
    return parameters


def refused(impl, max_norms: list) -> list:
    """Return the name of the error, or "nothing", for each max_norm."""
    function = impl.ddp.clip_and_count.clip_gradient_norm
    return [raised(lambda norm=norm: function(_parameters([torch.ones(2)]), norm)) for norm in max_norms]


def count(impl, cases: PerRank, groups: list) -> list:
    """Return the counts of each case, and their types. cases[rank]: list of {"targets": list of tensors, "ignore_index"
    (None: the default), "shape" (optional): targets are expanded to it, which needs no memory}."""
    rank = dist.get_rank()
    options, results = group_of(rank, groups), []
    for i, case in enumerate(cases[rank]):
        extra = {} if case["ignore_index"] is None else {"ignore_index": case["ignore_index"]}
        gates.mark(f"case {i}")
        targets = [t.expand(case["shape"]) for t in case["targets"]] if "shape" in case else case["targets"]
        got = impl.ddp.clip_and_count.count_step(targets, **extra, **options)
        counts = [getattr(got, name) for name in FIELDS]
        results.append([[int(count) for count in counts], [type(count).__name__ for count in counts]])
    return results
