"""Places a model on a mesh without `parallelize`: cuts whole tensors like those of a transformer."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.model.transformer import Config

AXES = ("data", "pipe", "expert", "tensor")
OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "up", "embedding", "head")
CUT = dict.fromkeys(OUTPUTS, 0) | {"o_proj": 1, "down_proj": 1, "down": 1}  # the dim of a layer that tensor cuts


def coordinate(degrees: dict, rank: int) -> dict:
    """Return a rank's index on each axis, tensor innermost."""
    indices = {}
    for axis in reversed(AXES):
        rank, indices[axis] = divmod(rank, degrees.get(axis, 1))
    return indices


def part_of(name: str, full: Tensor, index: int, ranks: int) -> Tensor:
    """Return the part of the tensor rank at `index` of `ranks`. Rows that pad a vocabulary are zeros."""
    dim = cut_along(name, ranks)
    if dim == 0:
        full = torch.cat([full, full.new_zeros(-len(full) % ranks, *full.shape[1:])])
    return full if dim is None or dim >= full.ndim else full.chunk(ranks, dim)[index]  # experts are not cut


def cut_along(name: str, ranks: int) -> int | None:
    """Return the dim along which this many tensor ranks cut the parameter; None if they do not."""
    return None if ranks == 1 or ".experts." in name else CUT.get(name.rpartition(".")[0].rpartition(".")[2])


def stage_of(layer: int, layers: int, stages: int) -> int:
    """Return the stage of a layer; if layers do not divide evenly, some stages, the first included, have one more."""
    return next(s for s in range(stages) if layer < -(-layers * (s + 1) // stages))


def names_at(names: Iterable[str], coord: dict, layout: dict) -> list[str]:
    """Return the parameters that a rank at these coordinates has a part of. layout: degrees, layers, experts, tied."""
    degrees, last, found = layout["degrees"], layout["degrees"].get("pipe", 1) - 1, []
    per_rank = max(1, layout["experts"] // degrees.get("expert", 1))
    for name in names:
        kind, *rest = name.split(".")
        stages = {
            stage_of(int(rest[0]), layout["layers"], last + 1) if kind == "blocks" else last * (kind != "embedding")
        }
        if name == "embedding.weight" and layout["tied"]:
            stages.add(last)
        remote = "experts" in rest and int(rest[rest.index("experts") + 1]) // per_rank != coord["expert"]
        if coord["pipe"] in stages and not remote:
            found.append(name)
    return found


class Share(nn.Module):
    """A rank's parts of the tensors `values`, as parameters: a `Placed` without layers, which cannot run.

    layout: degrees by axis, config as a dict, number of layers, experts per layer, tied, and small: None, or if data is
    fully sharded the number of elements below which a unit stays whole.
    """

    def __init__(self, impl, layout: dict, values: dict):
        super().__init__()
        self.degrees = dict.fromkeys(AXES, 1) | layout["degrees"]
        self.layout, self.coord = layout, coordinate(self.degrees, dist.get_rank())
        self.mesh, self.config = impl.mesh.mesh.Mesh(**layout["degrees"]), Config(**layout["config"])
        module = impl.mesh.placement
        placements, parts = [], []
        for unit in self._units(values):
            sizes = [part.numel() for _, part in unit]
            uncut = layout["small"] is None or sum(sizes) < layout["small"]
            axes = self._copies(unit[0][0])
            for group in [[each] for each in unit] if uncut else [unit]:
                pieces, flat = [], torch.cat([part.flatten() for _, part in group])
                count = len(flat) if uncut else -(-len(flat) // self.degrees["data"])
                first, offset = 0 if uncut else count * self.coord["data"], 0
                for name, part in group:
                    start, end = max(first, offset), min(first + count, offset + part.numel())
                    if start < end:
                        pieces.append(module.Piece(
                            name, tuple(part.shape), self._dim(name), start - offset, start - first, end - start
                        ))  # fmt: skip
                    offset += part.numel()
                placements.append(module.Placement(pieces, (("data",) if uncut else ()) + axes))
                parts.append(([name for name, _ in group], None if not uncut else group[0][1].shape))
        self._parts, self._placements = parts, placements
        self.shares = nn.ParameterList(self.cut(values))

    def placements(self) -> dict:
        return dict(zip(self.shares, self._placements, strict=True))

    def cut(self, values: dict) -> list[Tensor | None]:
        """Return this rank's parts of whole tensors, one per parameter of the rank; None if a tensor is missing."""
        local: list[Tensor | None] = []
        for names, shape in self._parts:
            if names[0] not in values:
                local.append(None)
                continue
            flat = torch.cat([self._part(name, values[name]).flatten() for name in names])
            if shape is None:
                flat = torch.cat([flat, flat.new_zeros(-len(flat) % self.degrees["data"])])
                flat = flat.view(self.degrees["data"], -1)[self.coord["data"]]
            local.append(flat.clone() if shape is None else flat.view(shape).clone())
        return local

    def _units(self, values: dict) -> list[list[tuple[str, Tensor]]]:
        """Return this rank's part of each parameter, grouped into the units that FSDP would shard."""
        units: dict = {}
        for name in names_at(values, self.coord, self.layout):
            layer = name.split(".")[1] if name.startswith("blocks.") else name
            kind = (layer, ".experts." in name, self._dim(name) is None)
            units.setdefault(kind, []).append((name, self._part(name, values[name])))
        return list(units.values())

    def _dim(self, name: str) -> int | None:
        return cut_along(name, self.degrees["tensor"])

    def _part(self, name: str, value: Tensor) -> Tensor:
        return part_of(name, value, self.coord["tensor"], self.degrees["tensor"])

    def _copies(self, name: str) -> tuple[str, ...]:
        axes = ("pipe",) * (self.layout["tied"] and self.degrees["pipe"] > 1 and name == "embedding.weight")
        return axes + ("expert",) * (".experts." not in name) + ("tensor",) * (self._dim(name) is None)
