"""ZeRO-3: each rank keeps 1/W of every layer, and holds a whole layer only while it computes."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.provided import provided

from .common import all_gather_single, reduce_scatter_single


@provided
class Unit:
    """Parameters of one layer that are sharded and gathered together: of one dtype, all trained or all frozen.

    shard: (n,), this rank's part of the parameters, laid end to end and padded with zeros to W·n; the optimizer steps
    it. full: (W·n,), a buffer for all of them; its storage is empty until you resize it.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None):
        """Shard the parameters of the group's rank 0."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.shapes = [p.shape for p in parameters]
        self.part = -(-flat.numel() // world)  # n
        self.sizes = [*(p.numel() for p in parameters), self.part * world - flat.numel()]
        dist.broadcast(flat, group_src=0, group=group)
        flat = torch.cat([flat, flat.new_zeros(self.sizes[-1])])
        self.shard = nn.Parameter(flat.view(world, -1)[rank].clone(), requires_grad=parameters[0].requires_grad)
        self.places: list[list[tuple[nn.Module, str]]] = [[] for _ in parameters]  # (module, attribute), for each
        self.names: list[list[str]] = [[] for _ in parameters]  # in the whole module's state_dict()
        self.in_backward = False  # for your use: backward has come to the layer
        self.work: dist.Work | None = None  # for your use: a gather that is under way
        self.make_room(flat.dtype)

    def make_room(self, dtype: torch.dtype) -> None:
        """Make `full` a tensor of this dtype with an empty storage."""
        self.full = torch.empty(sum(self.sizes), dtype=dtype, device=self.shard.device)
        self.full.untyped_storage().resize_(0)

    def pieces(self, full: Tensor) -> list[Tensor]:
        """Return each parameter as a view of a tensor like `full`; autograd passes through."""
        return [piece.view(s) for piece, s in zip(full.split(self.sizes), self.shapes, strict=False)]

    def show(self, full: Tensor) -> None:
        """Point the parameters of the layer's modules to a tensor like `full`."""
        for piece, places in zip(self.pieces(full), self.places, strict=True):
            for module, name in places:
                setattr(module, name, piece)

    def hide(self) -> None:
        """Remove the parameters from the layer's modules: using one now raises AttributeError."""
        for module, name in (place for places in self.places for place in places):
            vars(module).pop(name, None)

    def add_gradient(self, mean: Tensor) -> None:
        """Add `mean`, (n,), to the shard's gradient, in the shard's dtype."""
        mean = mean.to(self.shard.dtype)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)


@provided
def default_layers(module: nn.Module) -> list[nn.Module]:
    """The default layers: each member of a ModuleList or Sequential that has parameters, and elsewhere
    each module that has parameters of its own; none within another. Of `lab.model.transformer`: the embedding, each
    block, the last norm and the head."""
    layers = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            layers += [m for m in child if any(True for _ in m.parameters())]
        elif any(True for _ in child.parameters(recurse=False)):
            layers.append(child)
        else:
            layers += default_layers(child)
    return layers


class FSDP(nn.Module):
    """`module` with parameters, gradients, and so optimizer state, sharded over the ranks of `group`.

    All ranks construct it together, before the optimizer, and start with the parameters of rank 0. Give the optimizer
    `parameters()`: the shards, and the parameters that stay whole. A training step is that of `NaiveDDP`:

        loss(fsdp(x), y).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()

    A layer's parameters are grouped into `Unit`s. Gather a unit before the layer's forward, and free it afterwards.
    Gather it again when backward reaches the layer's output, and free it when its gradient is there; a reduce-scatter
    turns that gradient into this rank's n elements of the mean. Autograd saves views of `full`, so freeing empties the
    storage of `full`, and gathering fills the same storage again.

    Each use of a layer all-gathers a unit twice and reduce-scatters it once, with n elements per rank each time: 1.5
    times the bytes of data parallelism. Without gradients (no_grad, frozen) there is no reduce-scatter, and without
    backward only one gather. At most two layers are whole at once. A layer may be used several times in a step,
    also under torch.utils.checkpoint. Gradients add up over several backwards before a step. Parameters are attributes
    of their modules only while their layer computes.

    The methods from `message` to `reduce` are the parts that the next exercises change. They read `group`, `units` (all
    units) and `units_of[layer]` (the units that a layer needs). `zero/common.py` has both collectives.
    Source: Rajbhandari et al. 2019, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", sections 3.2 and 4.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Iterable[nn.Module] | None = None,
        small: int = 1024,
    ):
        """Shard `module` in place. layers: submodules of it; `default_layers(module)` if None.

        Layers with fewer than `small` elements, and parameters outside of layers, stay whole on every rank. A parameter
        shared by two layers (tied) is sharded once, with the first layer. Buffers are broadcast from the group's rank
        0, too. Raises ValueError if one layer is within another.
        """
        super().__init__()
        self.module, self.group = module, group
        self.units: list[Unit] = []
        self.units_of: dict[nn.Module, list[Unit]] = {}  # what a layer needs: its own, and what it shares with others
        self._cut(default_layers(module) if layers is None else list(layers), small)
        self.shards = nn.ParameterList(unit.shard for unit in self.units)
        for tensor in (*module.parameters(), *module.buffers()):  # what stays whole
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        for layer, units in self.units_of.items():
            if units:
                layer.register_forward_pre_hook(self._entered, with_kwargs=True)
                layer.register_forward_hook(self._left, always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the same arguments."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients of the parameters that stay whole over the group, and free gathered units.

        Call it after the last backward, before the optimizer's step. The gradients of shards are means already.
        """
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size(self.group))
                dist.all_reduce(parameter.grad, group=self.group)
        for unit in self.units:
            self.free(unit)

    def full_state(self) -> dict[str, Tensor]:
        """Return the state_dict() of the unsharded module, in the shards' dtype. Call it on every rank."""
        state = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        for unit in self.units:
            full = unit.shard.new_empty(sum(unit.sizes))
            all_gather_single(full, unit.shard.detach(), group=self.group)
            for names, piece in zip(unit.names, unit.pieces(full), strict=True):
                state.update((name, piece.clone()) for name in names)
        return state

    def message(self, unit: Unit) -> Tensor:
        """Return the tensor that this rank sends when `unit` is gathered: (n,), in the dtype of `unit.full`."""
        return unit.shard.detach()

    def start(self, unit: Unit) -> None:
        """Start to gather `unit`, unless it is whole or already started. Do not wait: the handle is `unit.work`."""
        storage = unit.full.untyped_storage()
        if not storage.nbytes():
            storage.resize_(unit.full.numel() * unit.full.element_size())
            unit.work = all_gather_single(unit.full, self.message(unit), group=self.group, async_op=True)

    def gather(self, unit: Unit) -> None:
        """Gather `unit`, and return when `unit.full` is whole."""
        self.start(unit)
        if unit.work is not None:
            unit.work.wait()
            unit.work = None

    def free(self, unit: Unit) -> None:
        """Free the memory of `unit.full`."""
        if unit.work is not None:
            self.gather(unit)  # what is being written must not vanish
        unit.hide()
        unit.full.untyped_storage().resize_(0)
        unit.in_backward = False

    def before_forward(self, layer: nn.Module) -> None:
        """Called before each forward of a layer: gather its units."""
        for unit in self.units_of[layer]:
            self.gather(unit)

    def before_backward(self, layer: nn.Module) -> None:
        """Called when backward reaches an output of a layer: gather its units."""
        for unit in self.units_of[layer]:
            unit.in_backward = True
            self.gather(unit)

    def reduce(self, unit: Unit, gradient: Tensor) -> None:
        """Add the mean of `gradient` over the group to the shard's gradient.

        gradient: (W·n,), of `unit.full` and in its dtype; it may be overwritten.
        """
        gradient.div_(dist.get_world_size(self.group))  # before SUM: the sum of large fp16 gradients overflows
        mean = gradient.new_empty(unit.part)
        reduce_scatter_single(mean, gradient, group=self.group)
        unit.add_gradient(mean)

    def _cut(self, layers: list[nn.Module], small: int) -> None:
        for outer in layers:
            if inside := [m for m in outer.modules() if m is not outer and m in layers]:
                raise ValueError(f"expected layers side by side, got a {type(inside[0]).__name__} in a "
                                 f"{type(outer).__name__}: leave out one of them")  # fmt: skip
        owner: dict[nn.Parameter, tuple[Unit, int]] = {}
        for layer in layers:
            own = [p for p in layer.parameters() if p not in owner]
            if sum(p.numel() for p in own) >= small:
                for kind in dict.fromkeys((p.dtype, p.requires_grad) for p in own):
                    same_kind = [p for p in own if (p.dtype, p.requires_grad) == kind]
                    self.units.append(Unit(same_kind, self.group))
                    owner.update((p, (self.units[-1], i)) for i, p in enumerate(same_kind))
            self.units_of[layer] = list(dict.fromkeys(owner[p][0] for p in layer.parameters() if p in owner))
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter in owner:
                    unit, i = owner[parameter]
                    unit.places[i].append((module, name))
                    unit.names[i].append(f"{prefix}.{name}" if prefix else name)
        for unit in self.units:
            for module, name in (place for places in unit.places for place in places):
                module._parameters.pop(name, None)

    def _entered(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self.before_forward(layer)
        units = self.units_of[layer]
        for unit in units:
            # The same storage, but a version of its own: filling it again is no change that autograd complains of.
            full = unit.full.data
            if unit.shard.requires_grad:
                full.requires_grad_().register_post_accumulate_grad_hook(functools.partial(self._reached, layer, unit))
            unit.show(full)
        if torch.is_grad_enabled() and not any(unit.shard.requires_grad for unit in units):
            # No gradient of a frozen layer says that it is done: its input's does.
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and x.grad_fn is not None:
                    x.register_hook(lambda _: self._release(layer))

    def _left(self, layer: nn.Module, args: Any, output: Any) -> None:
        for unit in self.units_of[layer]:
            if not unit.in_backward:  # else a checkpoint runs it again, and its backward is next
                self.free(unit)
        for y in tree_leaves(output):
            if isinstance(y, Tensor) and y.requires_grad:
                y.register_hook(lambda _: self.before_backward(layer))

    def _reached(self, layer: nn.Module, unit: Unit, full: Tensor) -> None:
        gradient, full.grad = full.grad, None
        assert gradient is not None
        self._release(layer)  # all of the layer's backward has run: it was made later than `full` was used first
        self.reduce(unit, gradient)

    def _release(self, layer: nn.Module) -> None:
        for unit in self.units_of[layer]:
            self.free(unit)
