"""FSDP along the data axis of a mesh: it shards what the other axes have sharded already."""

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor, nn

from lab.provided import provided

from ..zero.fsdp_gather import FSDP, Unit
from .mesh import Mesh


@provided
def uniform_layers(module: nn.Module, kind: Callable[[nn.Parameter], object]) -> list[nn.Module]:
    """The largest parts of `module`, list members at most, whose parameters are all of one kind: a block of a
    transformer, or where it has experts its norms, attention, router and experts."""
    layers = []
    for child in module.children():
        kinds = {kind(p) for p in child.parameters()}
        if len(kinds) > 1 or (kinds and type(child) in (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            layers += uniform_layers(child, kind)
        elif kinds:
            layers.append(child)
    return layers


class FSDPAxis(FSDP):
    """FSDP along the data axis of a mesh. `module` is this rank's part by the other axes; shard it into `data` parts.

    Use it like `FSDP`. Each rank calls backward on the mean loss of its own part of the batch, which is divided over
    data × expert. Afterwards gradients are those of the mean over the whole batch: all are divided by data · expert.
    In each backward, the reduce-scatter sums a unit's gradients over `data`. Once per step, this rank's 1/D of them is
    summed over the other axes whose ranks contribute: over `expert` except for experts, because those ranks had other
    tokens, and over `tensor` for partial parameters. Each unit takes one all-reduce over all of these axes, and so does
    each parameter that stays whole, beside the one over `data`. In this order only 1/D of the bytes crosses the expert
    axis.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        experts: Iterable[nn.Parameter] = (),
        partial: Iterable[nn.Parameter] = (),
        layers: Iterable[nn.Module] | None = None,
        small: int = 1024,
    ):
        """Shard `module` in place. All ranks of the mesh construct it together.

        experts: its parameters that live along the expert axis. partial: its parameters that all tensor ranks hold,
        each with the gradient of its own tokens only, as under sequence parallelism. layers: modules that are gathered
        together; if None, `uniform_layers` of those kinds. small: as in `FSDP`. Raises ValueError if the parameters of
        one layer must be summed over different axes. A kind is the set of axes to sum over, including axes of degree 1,
        so that layers are the same on every mesh.
        """
        experts, partial = set(experts), set(partial)

        def kind(p: nn.Parameter) -> tuple[str, ...]:
            return ("expert",) * (p not in experts) + ("tensor",) * (p in partial)

        axes = {name: kind(p) for name, p in module.named_parameters(remove_duplicate=False)}
        chosen = uniform_layers(module, kind) if layers is None else list(layers)
        for layer in chosen:
            if len({kind(p) for p in layer.parameters()}) > 1:
                raise ValueError(
                    f"expected layers of one kind, got a {type(layer).__name__} whose gradients are summed over "
                    f"different axes: cut it into smaller layers"
                )
        mesh.group("expert", "tensor")  # made here, by all ranks in the same order
        super().__init__(module, mesh.group("data"), layers=chosen, small=small)
        self.mesh = mesh
        self._beyond = {unit.shard: axes[unit.names[0][0]] for unit in self.units}
        self._beyond |= {p: axes[name] for name, p in module.named_parameters()}  # what stays whole

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Do the same as in `FSDP`, but divide the gradient by the number of expert ranks, too."""
        if self.mesh.size("expert") > 1:
            gradient.div_(self.mesh.size("expert"))
        super().reduce(unit, gradient)

    def finish_gradient_synchronization(self) -> None:
        """Do the same as in `FSDP`, and sum the remaining parts over the other axes. Call it once per step."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.mesh.size("expert"))
        super().finish_gradient_synchronization()
        for parameter, axes in self._beyond.items():
            if parameter.grad is not None and self.mesh.size(*axes) > 1:
                dist.all_reduce(parameter.grad, group=self.mesh.group(*axes))
