"""Checkpoints that any mesh writes and any other mesh reads."""

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

from .parallel import Parallel, Piece

WHOLE = -1  # start of what is no tensor of its parameter's shape, such as a count of steps


@dataclass(frozen=True)
class Where:
    """Where some saved numbers are in the whole: the name that they are saved under, as JSON."""

    name: str  # of the parameter
    key: str  # of the optimizer's state; "" for the parameter itself
    tensor: int  # whose part of it
    start: int  # in that part, flattened
    shape: list[int]  # of that part
    dim: int | None  # along which tensor had cut it


class MeshCheckpoint:
    """A folder that holds the state of a training run on some mesh as it was last saved, whole.

    Every number is saved once, by one rank, under its place in the whole model, so that a mesh of other degrees, with
    another plan, finds it: on 4 ranks or on 16, sharded along data or not. Tensors are in one safetensors file a rank,
    all else is JSON; nothing is pickled, and no tensor is sent. `index.json` names the files that belong together, and
    is replaced in one moment (os.replace) when all of them are on the disk: whoever is killed while saving, at whatever
    moment, leaves the checkpoint that was there. All ranks of the mesh call save and load together, on a folder that
    all of them see.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """folder: made by the first save if it is not there."""
        self.folder = Path(folder)

    def save(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save parameters, hyperparameters and the optimizer's state: what has the shape of its parameter in pieces.

        Of ranks that hold the same numbers the one with coordinate 0 along `copies` writes them. extra: what else is to
        come back, such as the step and a scheduler's state_dict; anything that JSON can say. Files of earlier saves are
        removed at the end. Raises ValueError unless the optimizer has one group: on another mesh, groups would be
        others.
        """
        if len(optimizer.param_groups) != 1:
            raise ValueError(f"expected an optimizer with one group of parameters, got {len(optimizer.param_groups)}")
        rank, world = dist.get_rank(), dist.get_world_size()
        number = [self._index().get("number", 0) + 1]
        dist.broadcast_object_list(number, src=0)
        files = [f"{number[0]:06}-{r:05}.safetensors" for r in range(world)]
        self.folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(dict(_own(parallel, optimizer)), self.folder / files[rank])
        _flush(self.folder / files[rank])
        dist.barrier()  # the index may not name what is not there yet
        if rank == 0:
            index = {
                "number": number[0],
                "files": files,
                "config": asdict(parallel.config),
                "group": {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")},
                "extra": extra,
            }
            new = self.folder / "index.json.new"
            new.write_text(json.dumps(index))
            _flush(new)
            os.replace(new, self.folder / "index.json")
            _flush(self.folder)
            for old in self.folder.glob("*.safetensors"):
                if old.name not in files:
                    old.unlink()
        dist.barrier()  # nobody goes on before it is saved

    def load(self, parallel: Parallel, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite parameters, hyperparameters and the optimizer's state with what was saved; return `extra`.

        At any moment a rank holds one whole tensor of the model beside its own. Raises FileNotFoundError where nothing
        was saved; ValueError, before anything is overwritten, where the model has another config than the saved one, or
        this rank a parameter that was not saved, as where experts are other.
        """
        index = self._index()
        if not index:
            raise FileNotFoundError(f"no checkpoint in {self.folder}: there is no index.json")
        if index["config"] != asdict(parallel.config):
            raise ValueError(f"expected the config that was saved, {index['config']}, got {asdict(parallel.config)}")
        with contextlib.ExitStack() as stack:
            saved = _Saved([stack.enter_context(safetensors.safe_open(self.folder / f, "pt")) for f in index["files"]])
            placements = parallel.placements()
            if missing := {p.name for placed in placements.values() for p in placed.pieces} - saved.names:
                raise ValueError(f"expected parameters that were saved, got {', '.join(sorted(missing))}")
            tensor, state = parallel.mesh.coordinate()["tensor"], {}
            for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
                pieces = placements[parameter].pieces
                saved.fill("", parameter.detach(), pieces, tensor)
                state[place] = {key: saved.state(key, parameter, pieces, tensor) for key in saved.keys_of(pieces)}
            group = {**index["group"], "params": list(range(len(state)))}
            group = {k: tuple(v) if isinstance(optimizer.defaults.get(k), tuple) else v for k, v in group.items()}
            optimizer.load_state_dict({"state": {k: v for k, v in state.items() if v}, "param_groups": [group]})
        return index["extra"]

    def _index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        return json.loads(path.read_text()) if path.exists() else {}


def _own(parallel: Parallel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What this rank writes: for each piece a name that says where it is in the whole, and its numbers."""
    here = parallel.mesh.coordinate()
    for parameter, placed in parallel.placements().items():
        if any(here[axis] for axis in placed.copies):
            continue
        for key, value in {"": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            value = torch.as_tensor(value)
            for piece in placed.pieces:
                own, start = value, WHOLE
                if value.shape == parameter.shape:
                    own, start = value.flatten()[piece.offset : piece.offset + piece.count], piece.start
                where = Where(piece.name, key, here["tensor"], start, list(piece.shape), piece.dim)
                yield json.dumps(astuple(where)), own.cpu().clone()


class _Saved:
    """All pieces of a checkpoint, by name of the parameter and key of its state ("": itself)."""

    def __init__(self, files: list[Any]):
        self.found: defaultdict[tuple[str, str], list[tuple[Where, Any, str]]] = defaultdict(list)
        for file in files:
            for label in file.keys():  # noqa: SIM118 - no mapping
                where = Where(*json.loads(label))
                self.found[where.name, where.key].append((where, file, label))
        self.names = {name for name, _ in self.found}

    def keys_of(self, pieces: list[Piece]) -> list[str]:
        """Keys of the optimizer's state that was saved of these parameters."""
        return sorted({key for name, key in self.found for piece in pieces if key and name == piece.name})

    def state(self, key: str, parameter: Tensor, pieces: list[Piece], tensor: int) -> Tensor:
        """One value of a parameter's state, as this rank holds it."""
        where, file, label = self.found[pieces[0].name, key][0]
        if where.start == WHOLE:
            return file.get_tensor(label)
        value = torch.zeros_like(parameter, dtype=file.get_tensor(label).dtype)
        self.fill(key, value, pieces, tensor)
        return value

    def fill(self, key: str, target: Tensor, pieces: list[Piece], tensor: int) -> None:
        """Write this rank's pieces of what was saved into `target`, of the parameter's shape."""
        flat = target.view(-1)
        for piece in pieces:
            part = self._part(piece, key, tensor).flatten()
            flat[piece.offset : piece.offset + piece.count] = part[piece.start : piece.start + piece.count]

    def _part(self, piece: Piece, key: str, tensor: int) -> Tensor:
        """The tensor rank's part of a parameter, of the shape that the mesh has now."""
        parts: dict[int, Tensor] = {}
        for where, file, label in self.found[piece.name, key]:
            numbers = file.get_tensor(label)
            part = parts.setdefault(where.tensor, numbers.new_empty(where.shape))
            part.view(-1)[where.start : where.start + len(numbers)] = numbers
        cut = self.found[piece.name, key][0][0].dim  # then; piece.dim is now
        whole = parts[0] if cut is None else torch.cat([parts[rank] for rank in sorted(parts)], cut)
        dim, place = (cut, 0) if piece.dim is None else (piece.dim, tensor)
        if dim is None:
            return whole
        size = piece.shape[dim]
        missing = max(0, (place + 1) * size - whole.shape[dim])  # rows that pad the vocabulary: more or fewer than then
        padding = whole.new_zeros([missing if d == dim else n for d, n in enumerate(whole.shape)])
        return torch.cat([whole, padding], dim).narrow(dim, place * size, size)


def _flush(path: Path) -> None:
    """Let what was written there reach the disk: else the index may, before the files it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
