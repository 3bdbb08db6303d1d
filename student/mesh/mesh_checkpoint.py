"""Checkpoints that any mesh writes and any other mesh reads."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .parallel import Parallel

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
        raise NotImplementedError("mesh.mesh_checkpoint: folder")

    def save(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save parameters, hyperparameters and the optimizer's state: what has the shape of its parameter in pieces.

        Of ranks that hold the same numbers the one with coordinate 0 along `copies` writes them. extra: what else is to
        come back, such as the step and a scheduler's state_dict; anything that JSON can say. Files of earlier saves are
        removed at the end. Raises ValueError unless the optimizer has one group: on another mesh, groups would be
        others.
        """
        raise NotImplementedError("mesh.mesh_checkpoint: Save parameters, hyperparameters and the optimizer's state")

    def load(self, parallel: Parallel, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite parameters, hyperparameters and the optimizer's state with what was saved; return `extra`.

        At any moment a rank holds one whole tensor of the model beside its own. Raises FileNotFoundError where nothing
        was saved; ValueError, before anything is overwritten, where the model has another config than the saved one, or
        this rank a parameter that was not saved, as where experts are other.
        """
        raise NotImplementedError(
            "mesh.mesh_checkpoint: Overwrite parameters, hyperparameters and the optimizer's state with what was saved"
        )
