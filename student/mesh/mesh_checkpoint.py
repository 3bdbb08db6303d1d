"""Checkpoints that any mesh can write and any other mesh can read."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from .placement import Placed


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
        raise NotImplementedError("mesh.mesh_checkpoint: write MeshCheckpoint.__init__")

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
        raise NotImplementedError(
            "mesh.mesh_checkpoint: Save parameters, the optimizer's state and its hyperparameters"
        )

    def load(self, parallel: Placed, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite parameters, the optimizer's state and its hyperparameters with the saved ones; return `extra`.

        Hyperparameters that are tuples, such as betas, come back as tuples, although JSON has only lists. Rows that pad
        the vocabulary differ between meshes: they are dropped, or filled with zeros. Tensors are assembled one after
        the other, so a rank holds at most two whole tensors of the model beside its own part.

        Raises FileNotFoundError if nothing was saved, and ValueError unless the optimizer has one group. Raises
        ValueError, before anything on this rank is overwritten, if the config differs from the saved one, or if a
        parameter was not saved or has another shape, for example with another number of experts.
        """
        raise NotImplementedError(
            "mesh.mesh_checkpoint: Overwrite parameters, the optimizer's state and its hyperparameters with the saved …"
        )
