"""Probes that call the cost functions on given cases."""


def link(impl, case: dict):
    return impl.ddp.accounting.Link(alpha_s=case["alpha_s"], bytes_per_s=case["bytes_per_s"])


def rings(impl, cases: list) -> list:
    return [float(impl.ddp.accounting.all_reduce_s(c["bytes"], c["world"], link(impl, c))) for c in cases]


def steps(impl, cases: list) -> list:
    """options: keyword arguments."""
    told = []
    for c in cases:
        got = impl.ddp.accounting.accounting(c["sizes"], c["world"], link(impl, c), **c["options"])
        times = {n: float(getattr(got, n)) for n in ("communication_s", "exposed_s", "step_s", "bound_s")}
        told.append({"all_reduces": int(got.all_reduces), **times})
    return told


def best(impl, cases: list) -> list:
    """The best bucket size, and the type of the result."""
    module, told = impl.ddp.accounting, []
    for c in cases:
        got = module.best_bucket_bytes(c["sizes"], c["world"], link(impl, c), backward_s=c["backward_s"])
        told.append([int(got), type(got).__name__])
    return told


def limits(impl, cases: list) -> list:
    told = []
    for c in cases:
        given = {"backward_s": c["backward_s"], "samples": c["samples"]}
        got = impl.ddp.accounting.limits(c["bytes"], c["world"], link(impl, c), **given)
        told.append([int(got.samples), float(got.bytes_per_s), int(got.world)])
    return told
