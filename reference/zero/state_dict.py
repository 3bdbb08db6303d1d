"""Checkpoints of a sharded training state: saved by any number of ranks, loaded by any other number, atomically."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .common import hyperparameters


class Checkpoint:
    """A folder with the training state as it was last saved: parameters, buffers, optimizer.

    Tensors are in safetensors files, everything else is JSON, and nothing is pickled. An index names the files of the
    checkpoint. It is replaced atomically (os.replace) once all of them are written, so a process that is killed while
    saving, at any moment, leaves the previous checkpoint intact. All ranks of `group` (default: the world) call
    save and load together, on a folder that all of them see.
    """

    def __init__(self, folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None):
        """folder: created by the first save if it does not exist."""
        self.folder, self.group = Path(folder), group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        gathered: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save `module` and an `optimizer` of its parameters, whose `state` on each rank has that rank's tensors only.

        gathered=False: every rank writes one file with its own state and a part of the parameters; no tensor is sent.
        gathered=True: one rank receives all tensors and writes one file. extra: anything else that load() should return
        and JSON can express, such as a scheduler's state_dict. Files of earlier saves, failed ones too, are removed at
        the end.
        """
        tensors, plain = self._own(module, optimizer)
        if gathered:
            tensors, plain = self._gather(tensors, plain)
        number = [self._index().get("number", 0) + 1]
        dist.broadcast_object_list(number, group_src=0, group=self.group)
        files = [f"{number[0]:06}-{rank:05}.safetensors" for rank in range(1 if gathered else self.world)]
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank < len(files):
            safetensors.torch.save_file(tensors, self.folder / files[self.rank], {"plain": json.dumps(plain)})
            _flush(self.folder / files[self.rank])
        dist.barrier(group=self.group)  # the index may not name what is not there yet
        if self.rank == 0:
            names = {p: name for name, p in module.named_parameters()}
            groups = [
                {**_plain(hyperparameters(g)), "params": [names[p] for p in g["params"]]}
                for g in optimizer.param_groups
            ]
            new = self.folder / "index.json.new"
            new.write_text(json.dumps({"number": number[0], "files": files, "groups": groups, "extra": extra}))
            _flush(new)
            os.replace(new, self.folder / "index.json")
            _flush(self.folder)
            for old in self.folder.glob("*.safetensors"):
                if old.name not in files:
                    old.unlink()
        dist.barrier(group=self.group)  # nobody goes on before it is saved

    def load(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite `module` and `optimizer` with the saved state, from any number of ranks; return `extra`.

        The optimizer loads the whole state and keeps the part of its own tensors. Raises FileNotFoundError if nothing
        was saved. Raises ValueError, before anything is overwritten, if the names or shapes of parameters and buffers,
        or the names in the optimizer's groups, differ from the saved ones.
        """
        index = self._index()
        if not index:
            raise FileNotFoundError(f"no checkpoint in {self.folder}: there is no index.json")
        targets = {f"tensor/{name}": tensor for name, tensor in _tensors(module).items()}
        names = {p: name for name, p in module.named_parameters()}
        listed = [[names[p] for p in g["params"]] for g in optimizer.param_groups]
        saved, state = self._read(index["files"])
        if differing := sorted(targets.keys() ^ saved.keys()):
            raise ValueError(f"expected the tensors that were saved; on one side only: {', '.join(differing)}")
        if resized := [name for name, t in targets.items() if t.shape != saved[name].shape]:
            raise ValueError(f"expected the shapes that were saved; others are here: {', '.join(resized)}")
        if listed != [g["params"] for g in index["groups"]]:
            raise ValueError(f"expected the groups {[g['params'] for g in index['groups']]}, got {listed}")
        for name, tensor in targets.items():
            tensor.copy_(saved[name])
        places = {name: place for place, name in enumerate(name for group in listed for name in group)}
        groups = []
        for now, then in zip(optimizer.param_groups, index["groups"], strict=True):
            restored = {k: _like(now[k], v) if k in now else v for k, v in then.items()}
            groups.append({**restored, "params": [places[name] for name in then["params"]]})
        optimizer.load_state_dict({"state": {places[n]: s for n, s in state.items()}, "param_groups": groups})
        return index["extra"]

    def _index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _own(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors that this rank saves, and the state that is no tensor."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for place, (name, tensor) in enumerate(_tensors(module).items()):
            if place % self.world == self.rank:  # all ranks have it
                tensors[f"tensor/{name}"] = _alone(tensor)
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = _alone(value)
                else:
                    plain[f"{key}/{name}"] = value
        return tensors, plain

    def _gather(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All ranks' tensors at rank 0, one after the other."""
        gathered: list[Any] = [None] * self.world
        header = [(name, t.shape, t.dtype) for name, t in tensors.items()]
        dist.gather_object((header, plain), gathered if self.rank == 0 else None, group_dst=0, group=self.group)
        if self.rank > 0:
            for tensor in tensors.values():
                dist.send(tensor, group_dst=0, group=self.group)
            return {}, {}
        for rank, (theirs, values) in enumerate(gathered[1:], start=1):
            plain |= values
            for name, shape, dtype in theirs:
                tensors[name] = torch.empty(shape, dtype=dtype)
                dist.recv(tensors[name], group_src=rank, group=self.group)
        return tensors, plain

    def _read(self, files: list[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Tensors of the module by "tensor/name", and each parameter's state."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for file in files:
            with safetensors.safe_open(self.folder / file, "pt") as opened:
                values |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - no mapping
                values |= json.loads(opened.metadata()["plain"])
        state: dict[str, dict[str, Any]] = {}
        for place, value in values.items():
            key, _, name = place.partition("/")
            if key == "tensor":
                tensors[place] = value
            else:
                state.setdefault(name, {})[key] = value
        return tensors, state


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that are to be saved, tied ones once."""
    kept = module.state_dict().keys()
    buffers = {name: b for name, b in module.named_buffers() if name in kept}
    return {name: t.detach() for name, t in {**dict(module.named_parameters()), **buffers}.items()}


def _alone(tensor: Tensor) -> Tensor:
    """The same numbers on the host in memory of their own: safetensors refuses what shares its memory."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _plain(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with numbers in place of tensors of one number."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in hyperparameters.items()}


def _like(now: Any, then: Any) -> Any:
    """Return a hyperparameter from JSON in its current type."""
    if isinstance(now, Tensor):
        return torch.full_like(now, then)
    return tuple(then) if isinstance(now, tuple) else then


def _flush(path: Path) -> None:
    """Flush a file to the disk, or the index may reach the disk before the files that it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
