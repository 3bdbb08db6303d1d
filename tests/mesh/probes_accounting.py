"""Calls the cost functions of a mesh on given cases."""

from lab.harness.calls import plain
from lab.harness.raising import raised
from lab.model.transformer import Config


def costs(impl, cases: list) -> list:
    """Return the costs per case, with one entry per axis for bytes. case: config, work, degrees, stage, fsdp."""
    results = [plain(_cost(impl, case)) for case in cases]
    return [{**cost, **cost["bytes"]} for cost in results]


def refused(impl, cases: list) -> list:
    return [raised(lambda case=case: _cost(impl, case)) for case in cases]


def _cost(impl, case: dict):
    module = impl.mesh.accounting
    work = module.Workload(Config(**case["config"]), **case["work"])
    return module.accounting(work, module.Degrees(**case["degrees"]), stage=case["stage"], fsdp=case["fsdp"])


def times(impl, cases: list) -> list:
    module, seconds = impl.mesh.accounting, []
    for c in cases:
        device = module.Device(**c["device"])
        options = {} if c["sharded"] is None else {"sharded": c["sharded"]}
        got = module.layer_times(
            c["tokens"], c["width"], c["hidden"], data=c["data"], tensor=c["tensor"], device=device,
            element=c["element"], **options,
        )  # fmt: skip
        seconds.append([float(got.compute_s), float(got.data_s), float(got.tensor_s)])
    return seconds


def limits(impl, cases: list) -> list:
    """Return [tokens, data, tensor] per case: its fewest tokens, and the best split of its ranks at its own tokens."""
    module, results = impl.mesh.accounting, []
    for c in cases:
        device, options = module.Device(**c["device"]), {"overlap": c["overlap"], "element": c["element"]}
        fewest = module.fewest_tokens(
            c["width"], c["hidden"], data=c["data"], tensor=c["tensor"], device=device, **options
        )
        data, tensor = module.best_split(
            c["data"] * c["tensor"], c["tokens"], c["width"], c["hidden"], device=device, **options
        )
        results.append([float(fewest), int(data), int(tensor)])
    return results
