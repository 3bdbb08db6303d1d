"""Checkpoints that any mesh can write and any other mesh can read."""

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from .placement import Piece, Placed


class MeshCheckpoint:
    """A folder with the state of a training run on a mesh, as it was last saved.

    Each number is saved once, by one of the ranks that hold it, under its place in the whole model. So a mesh of other
    degrees, with another plan, finds it: on 4 ranks or on 16, sharded along data or not. Each rank writes its tensors
    as safetensors, everything else is JSON, nothing is pickled, and no tensor is sent. One file, such as `index.json`,
    names the files of the checkpoint. It is replaced atomically (os.replace) once all of them are on the disk
    (os.fsync), so a process that is killed while saving, at any moment, leaves the previous checkpoint intact. All
    ranks of the mesh call save and load together, on a folder that all of them see. When save returns on any rank, the
    new checkpoint is in place.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """folder: created by the first save if it does not exist."""
        self.folder = Path(folder)

    def save(
        self, parallel: Placed, optimizer: torch.optim.Optimizer, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save parameters, the optimizer's state and its hyperparameters.

        If several ranks hold the same numbers, the rank with coordinate 0 along `copies` writes them. State with the
        parameter's shape is split into the same pieces. A single number, such as a step count, is saved once per
        piece. extra: anything else that load() should return and JSON can express, such as the step and a scheduler's
        state_dict. Files of earlier saves are removed at the end.

        On every rank, before anything is written: raises ValueError unless the optimizer has one group (on another mesh
        groups would differ), and TypeError if JSON cannot express extra or a hyperparameter.
        """
        group = _only_group(optimizer)
        kept = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        rank, number = dist.get_rank(), [self._index().get("number", 0) + 1]
        dist.broadcast_object_list(number, src=0)
        files = [f"{number[0]:06}-{r:05}.safetensors" for r in range(dist.get_world_size())]
        config = asdict(parallel.config)
        index = json.dumps(
            {"number": number[0], "files": files, "config": config, "hyperparameters": kept, "extra": extra}
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(dict(_own(parallel, optimizer)), self.folder / files[rank])
        _flush(self.folder / files[rank])
        dist.barrier()  # the index may not name what is not there yet
        if rank == 0:
            new = self.folder / "index.json.new"
            new.write_text(index)
            _flush(new)
            os.replace(new, self.folder / "index.json")
            _flush(self.folder)
            for old in self.folder.glob("*.safetensors"):
                if old.name not in files:
                    old.unlink()
        dist.barrier()  # nobody goes on before it is saved

    def load(self, parallel: Placed, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite parameters, the optimizer's state and its hyperparameters with the saved ones; return `extra`.

        Hyperparameters that are tuples, such as betas, come back as tuples, although JSON has only lists. Rows that pad
        the vocabulary differ between meshes: they are dropped, or filled with zeros. Tensors are assembled one after
        the other, so a rank holds at most two whole tensors of the model beside its own part.

        Raises FileNotFoundError if nothing was saved, and ValueError unless the optimizer has one group. Raises
        ValueError, before anything on this rank is overwritten, if the config differs from the saved one, or if a
        parameter was not saved or has another shape, for example with another number of experts.
        """
        index = self._index()
        if not index:
            raise FileNotFoundError(f"no checkpoint in {self.folder}: there is no index.json")
        group, config = _only_group(optimizer), asdict(parallel.config)
        if index["config"] != config:
            raise ValueError(f"expected the config that was saved, {index['config']}, got {config}")
        placements, tensor = parallel.placements(), parallel.mesh.coordinate()["tensor"]
        with contextlib.ExitStack() as stack:
            saved = _Saved([stack.enter_context(safetensors.safe_open(self.folder / f, "pt")) for f in index["files"]])
            for piece in (piece for placed in placements.values() for piece in placed.pieces):
                saved.check(piece)
            state = {}
            for parameter, placed in placements.items():
                saved.fill(parameter.detach(), "", placed.pieces, tensor)
                state[parameter] = saved.state(parameter, placed.pieces, tensor)
        kept = {k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in index["hyperparameters"].items()}
        own = {place: state[p] for place, p in enumerate(group["params"]) if state.get(p)}
        restored = {**kept, "params": list(range(len(group["params"])))}
        optimizer.load_state_dict({"state": own, "param_groups": [restored]})
        return index["extra"]

    def _index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        return json.loads(path.read_text()) if path.exists() else {}


@dataclass(frozen=True)
class _Where:
    """The place of some saved numbers in the model; as JSON, the name in the file."""

    name: str  # of the parameter in the whole model
    key: str  # of the optimizer's state; "" for the parameter itself
    tensor: int  # the tensor rank whose part of it they are from
    start: int | None  # where they begin in that part, flattened; None for a single number, which belongs to all of it
    shape: list[int]  # of that part
    dim: int | None  # along which tensor had cut it


def _own(parallel: Placed, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that this rank writes, under a name with its place in the whole model."""
    here = parallel.mesh.coordinate()
    for parameter, placed in parallel.placements().items():
        if any(here[axis] for axis in placed.copies):
            continue
        for key, value in {"": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            value = torch.as_tensor(value)
            for piece in placed.pieces:
                own, start = value.clone(), None
                if value.shape == parameter.shape:
                    own, start = value.flatten()[piece.offset : piece.offset + piece.count], piece.start
                where = _Where(piece.name, key, here["tensor"], start, list(piece.shape), piece.dim)
                yield json.dumps(astuple(where)), own.cpu()


class _Saved:
    """All that a checkpoint's files hold, by name of the parameter and key of its state ("": itself)."""

    def __init__(self, files: list[Any]):
        found: defaultdict[tuple[str, str], list[tuple[_Where, Any, str]]] = defaultdict(list)
        for file in files:
            for label in file.keys():  # noqa: SIM118 - no mapping
                where = _Where(*json.loads(label))
                found[where.name, where.key].append((where, file, label))
        self.found = dict(found)

    def check(self, piece: Piece) -> None:
        """Raise ValueError where the parameter that it is a piece of was not saved, or had another shape."""
        if (piece.name, "") not in self.found:
            raise ValueError(f"expected parameters that were saved, got {piece.name}")
        then = self.found[piece.name, ""][0][0]
        cut = (then.dim, piece.dim)  # along these the parts differ, and the config says what the whole is
        shapes = [[n for dim, n in enumerate(shape) if dim not in cut] for shape in (then.shape, piece.shape)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected {piece.name} of the shape that was saved, {then.shape}, got {piece.shape}")

    def state(self, parameter: Tensor, pieces: list[Piece], tensor: int) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, as this rank holds it."""
        state = {}
        for name, key in (place for piece in pieces for place in self.found if place[0] == piece.name):
            if key and key not in state:
                where, file, label = self.found[name, key][0]
                state[key] = file.get_tensor(label)
                if where.start is not None:
                    state[key] = torch.zeros_like(parameter, dtype=state[key].dtype)
                    self.fill(state[key], key, pieces, tensor)
        return state

    def fill(self, target: Tensor, key: str, pieces: list[Piece], tensor: int) -> None:
        """Write this rank's pieces of what was saved into `target`, of the parameter's shape."""
        for piece in pieces:
            if (piece.name, key) in self.found:
                part = self._part(piece, key, tensor).flatten()
                target.view(-1)[piece.offset :][: piece.count] = part[piece.start :][: piece.count]

    def _part(self, piece: Piece, key: str, tensor: int) -> Tensor:
        """The tensor rank's part, as the mesh cuts it now, of what it is a piece of."""
        whole, then = self._whole(piece.name, key)
        dim, place = (then, 0) if piece.dim is None else (piece.dim, tensor)
        if dim is None:
            return whole
        size = piece.shape[dim]
        saved = whole.movedim(dim, 0)[place * size : (place + 1) * size]
        part = whole.new_zeros(piece.shape)  # where the vocabulary is padded by more rows than it was, they are zeros
        part.movedim(dim, 0)[: len(saved)] = saved
        return part

    def _whole(self, name: str, key: str) -> tuple[Tensor, int | None]:
        """A tensor of the model put together from its pieces, and the dim along which tensor had cut it."""
        saved = self.found[name, key]
        first, file, label = saved[0]
        parts = file.get_tensor(label).new_empty(1 + max(where.tensor for where, *_ in saved), *first.shape)
        for where, file, label in saved:
            numbers = file.get_tensor(label)
            parts[where.tensor].view(-1)[where.start :][: len(numbers)] = numbers
        dim = first.dim
        return (parts[0] if dim is None else parts.movedim(0, dim).flatten(dim, dim + 1)), dim


def _only_group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if len(optimizer.param_groups) != 1:
        raise ValueError(f"expected an optimizer with one group of parameters, got {len(optimizer.param_groups)}")
    return optimizer.param_groups[0]


def _flush(path: Path) -> None:
    """Flush a file to the disk, or the index may reach the disk before the files that it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
