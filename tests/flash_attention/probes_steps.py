"""Probes of single steps: set memory layouts, call, return results and observations."""

import torch

from lab.harness.callers import CallerTensors
from lab.harness.calls import plain
from lab.harness.layouts import lay_out_all
from lab.harness.raising import raised
from lab.measure.kernels import addresses, watching
from lab.measure.memory import meter
from lab.measure.process import poisoned


def weighted_sums(impl, cases: list[dict]) -> list:
    """y of each case, or dx and dweight if the case has dy. Memory that no kernel wrote is NaN.

    A case has x, weight, perhaps dy, and their memory layouts.
    """
    results = []
    for case in cases:
        arguments = _arguments(case)
        caller = CallerTensors(**arguments)
        with poisoned(), watching():
            out = _weighted_sum(impl, *arguments.values())
        named = {"dx": out[0], "dweight": out[1]} if "dy" in case else {"y": out}
        results.append({**named, "callers": caller.seen()})
    return results


def weighted_sum_kernels(impl, case: dict) -> dict:
    """Launches and memory accesses of one call, and whether a second call agrees bit for bit."""
    arguments = _arguments(case)
    with poisoned():
        with watching(keep=True) as seen:
            out = _weighted_sum(impl, *arguments.values())
        second = _weighted_sum(impl, *arguments.values())
    out, second = (o if isinstance(o, tuple) else (o,) for o in (out, second))
    read, written = seen.touched("load"), seen.touched("store", "atomic")
    tensors = {"in": arguments.values(), "out": out}
    elements = {name: [set(addresses(t).flatten().tolist()) for t in ts] for name, ts in tensors.items()}
    return {
        "launches": [launch.kernel for launch in seen.launches],
        "operators": seen.operators,
        "atomics": seen.atomics,
        "unread": [len(each - read) for each in elements["in"]],
        "unwritten": [len(each - written) for each in elements["out"]],
        "written_inputs": sum(len(each & written) for each in elements["in"]),
        "raced": seen.races(),
        "contiguous": all(o.is_contiguous() for o in out),
        "equal": all(torch.equal(a, b) for a, b in zip(out, second, strict=True)),
    }


def _weighted_sum(impl, x, weight, dy=None):
    if dy is None:
        return impl.flash_attention.weighted_sum_forward.weighted_sum_forward(x, weight)
    return impl.flash_attention.weighted_sum_backward.weighted_sum_backward(x, weight, dy)


def _arguments(case: dict) -> dict[str, torch.Tensor]:
    return lay_out_all({name: case[name] for name in ("x", "weight", "dy") if name in case}, case["layouts"])


def softmax_statistics(impl, cases: list[dict]) -> list[dict]:
    """maximum, normaliser and lse of each case's tiles, which come from a generator unless the case says otherwise."""
    results = []
    for case in cases:
        tiles = case["tiles"]
        given, caller = (t for t in tiles) if case.get("generator", True) else tiles, CallerTensors(tiles=tiles)
        got = _statistics(impl, given)
        results.append({**got, "callers": caller.seen()})
    return results


def softmax_of_many(impl, seed: torch.Tensor, factors: list[float]) -> list[dict]:
    """The same statistics for tiles that a generator makes one by one: seed times each factor."""
    return [_statistics(impl, (seed * factor for factor in factors))]


def softmax_memory(impl, seed: torch.Tensor, factors: list[float]) -> dict:
    """Return the memory that softmax_of_many allocates, according to torch's dispatcher."""
    with meter(inputs=(seed,)) as measured:
        softmax_of_many(impl, seed, factors)
    return measured.plain()


def _statistics(impl, tiles) -> dict:
    got = impl.flash_attention.online_softmax.online_softmax(tiles)
    return {"maximum": got.maximum, "normaliser": got.normaliser, "lse": got.lse}


def softmax_of_nothing(impl) -> list[str]:
    """The names of the exceptions for an empty list and an empty generator."""
    function = impl.flash_attention.online_softmax.online_softmax
    return [raised(lambda: function([])), raised(lambda: function(t for t in ()))]


def attention_gradients(impl, given: dict, is_causal, layouts: dict) -> dict:
    """dq, dk, dv; layouts: memory layouts of the arguments."""
    inputs = lay_out_all({name: given[name] for name in ("q", "k", "v", "o", "lse", "do")}, layouts)
    caller = CallerTensors(**inputs)
    got = impl.flash_attention.tiled_backward.tiled_backward(*inputs.values(), is_causal)
    return {**dict(zip(("dq", "dk", "dv"), got, strict=True)), "callers": caller.seen()}


def occupancies(impl, cases: list[dict]) -> list:
    """The result of occupancy for each case. limits in a case: those of another multiprocessor."""
    module = impl.flash_attention.occupancy
    found = []
    for case in cases:
        limits = (module.Multiprocessor(**case["limits"]),) if "limits" in case else ()
        found.append(plain(module.occupancy(case["registers"], case["shared_bytes"], case["warps"], *limits)))
    return found


def fused_losses(impl, cases: list[dict]) -> list[dict]:
    """Loss and gradients of each case, and "saved": the bytes saved for backward besides the arguments.

    A case has x, weight, targets, layouts, chunk (None: the default) and dloss, the incoming gradient. times: number of
    losses before backward begins. twice: run backward twice. needs: whether x and weight need a gradient.
    """
    found = []
    for case in cases:
        inputs = lay_out_all({n: case[n] for n in ("x", "weight", "targets")}, case["layouts"])
        inputs = {n: t.detach() for n, t in inputs.items()}
        for name, needs in zip(("x", "weight"), case.get("needs", (True, True)), strict=True):
            inputs[name].requires_grad_(needs)
        caller = CallerTensors(**inputs)
        chunk = () if case["chunk"] is None else (case["chunk"],)
        losses = [_fused(impl, *inputs.values(), *chunk) for _ in range(case.get("times", 1))]
        saved_tensors = getattr(losses[-1].grad_fn, "saved_tensors", ())
        saved = sum(t.nbytes for t in saved_tensors if all(t is not x for x in inputs.values()))
        loss, wanted = losses[-1], {f"d{n}": t for n, t in inputs.items() if t.requires_grad}
        incoming = [torch.full_like(loss, case["dloss"])] * len(losses)
        grads = caller.gradients(losses, wanted, incoming, case["twice"])
        found.append({"loss": loss, **grads, "callers": caller.seen(), "saved": saved})
    return found


def _fused(impl, *inputs) -> torch.Tensor:
    return impl.flash_attention.fused_cross_entropy.FusedCrossEntropy.apply(*inputs)
