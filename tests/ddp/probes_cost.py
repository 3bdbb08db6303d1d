"""Probes that call the cost functions on given cases."""


def link(impl, case: dict):
    return impl.ddp.accounting.Link(alpha_s=case["alpha_s"], bytes_per_s=case["bytes_per_s"])


def rings(impl, cases: list) -> list:
    return [float(impl.ddp.accounting.all_reduce_s(c["bytes"], c["world"], link(impl, c))) for c in cases]


def steps(impl, cases: list) -> list:
    """Return the costs of each case. case["options"]: keyword arguments of accounting()."""
    found = [impl.ddp.accounting.accounting(c["sizes"], c["world"], link(impl, c), **c["options"]) for c in cases]
    times = "communication_s", "exposed_s", "step_s", "bound_s"
    return [{"all_reduces": int(got.all_reduces), **{n: float(getattr(got, n)) for n in times}} for got in found]


def best(impl, cases: list) -> list:
    """Return [best bucket size, type of the result] per case."""
    function = impl.ddp.accounting.best_bucket_bytes
    found = [function(c["sizes"], c["world"], link(impl, c), backward_s=c["backward_s"]) for c in cases]
    return [[int(got), type(got).__name__] for got in found]


def limits(impl, cases: list) -> list:
    function, names = impl.ddp.accounting.limits, ("backward_s", "samples")
    found = [function(c["bytes"], c["world"], link(impl, c), **{n: c[n] for n in names}) for c in cases]
    return [[int(got.samples), float(got.bytes_per_s), int(got.world)] for got in found]
