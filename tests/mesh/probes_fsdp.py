"""Shards a small model along data. Its parameters are replicated along some axes of a mesh and differ along others."""

import functools

import torch
import torch.nn.functional as F

from lab.harness.raising import raised
from lab.model.transformer import Config, Transformer
from lab.ranks import gates


def sharded(impl, sizes: dict, states: list, degrees: dict, batches: list, experts: list, partial: list, small: int,
            layers: list | None) -> dict:  # fmt: skip
    """Return gradients of the mean loss of this rank's micro-batches, as pieces, and the sizes of its units and of its
    unsharded parameters ("whole"). experts, partial: names of parameters. layers: names of modules."""
    mesh = impl.mesh.mesh.Mesh(**degrees)
    module = Transformer(Config(**sizes))
    module.load_state_dict(states[mesh.here])
    fsdp = impl.mesh.fsdp_axis.FSDPAxis(
        module, mesh, experts=[*map(module.get_parameter, experts)], partial=[*map(module.get_parameter, partial)],
        small=small, layers=layers and [*map(module.get_submodule, layers)],
    )  # fmt: skip
    gates.mark("micro-batches")
    for tokens, targets in batches[mesh.here]:
        loss = F.cross_entropy(fsdp(tokens).flatten(0, 1), targets.flatten())
        (loss / len(batches[mesh.here])).backward()
    gates.mark("finish")
    fsdp.finish_gradient_synchronization()
    gradients = []  # [name, start, numbers]
    data_rank = mesh.coordinate()["data"]
    for unit in fsdp.units:
        start, shard_start = 0, data_rank * unit.part
        for (name, *_), size in zip(unit.names, unit.sizes, strict=False):
            low, high = max(start, shard_start), min(start + size, shard_start + unit.part)
            if low < high:
                gradients.append([name, low - start, unit.shard.grad[low - shard_start : high - shard_start].clone()])
            start += size
    gradients += [[name, 0, p.grad.flatten().clone()] for name, p in fsdp.module.named_parameters()]
    return {
        "gradients": gradients,
        "units": [[unit.part, [names[0] for names in unit.names]] for unit in fsdp.units],
        "whole": [[name, p.numel()] for name, p in fsdp.module.named_parameters()],
    }


def large(impl, value: float, small: int) -> float:
    """Return the gradient of a float16 weight on 4 expert ranks, each of which contributes `value`."""
    mesh = impl.mesh.mesh.Mesh(expert=4)
    module = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False, dtype=torch.float16))
    fsdp = impl.mesh.fsdp_axis.FSDPAxis(module, mesh, small=small)
    fsdp(torch.full((1, 1), value, dtype=torch.float16)).sum().backward()
    fsdp.finish_gradient_synchronization()
    return float(next(p.grad for p in fsdp.parameters()).flatten()[0])


def refused(impl, sizes: dict, experts: list, meshes: list) -> list[str]:
    """Return the error of FSDPAxis on each mesh, if one layer (a whole block) has expert parameters and others."""
    errors = []
    for degrees in meshes:
        mesh, module = impl.mesh.mesh.Mesh(**degrees), Transformer(Config(**sizes))
        parameters, layers = [*map(module.get_parameter, experts)], [*module.blocks]
        shard = functools.partial(impl.mesh.fsdp_axis.FSDPAxis, module, mesh, experts=parameters, layers=layers)
        errors.append(raised(shard, text=True))
    return errors
