"""Checkpoints that any mesh writes and any other mesh reads."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from .placement import Placed


class MeshCheckpoint:
    """A folder that holds the state of a training run on some mesh as it was last saved, whole.

    Every number is saved once, by one rank, under its place in the whole model, so that a mesh of other degrees, with
    another plan, finds it: on 4 ranks or on 16, sharded along data or not. Tensors are in one safetensors file a rank,
    all else is JSON; nothing is pickled, and no tensor is sent. `index.json` names the files that belong together, and
    is replaced in one moment (os.replace) when all of them are on the disk (os.fsync): whoever is killed while saving,
    at whatever moment, leaves the checkpoint that was there. All ranks of the mesh call save and load together, on a
    folder that all of them see; when save returns, on whichever rank, the checkpoint is the new one.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """folder: made by the first save if it is not there."""
        raise NotImplementedError("mesh.mesh_checkpoint: write MeshCheckpoint.__init__")

    def save(
        self, parallel: Placed, optimizer: torch.optim.Optimizer, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save parameters, the optimizer's state and its hyperparameters.

        Of ranks that hold the same numbers the one with coordinate 0 along `copies` writes them. State of its
        parameter's shape is saved in pieces as the parameter is; what is a single number, such as a count of steps,
        with each piece. extra: what else is to come back, such as the step and a scheduler's state_dict; anything that
        JSON can say. Files of earlier saves, failed ones too, are removed at the end.

        On every rank, before anything is written: raises ValueError unless the optimizer has one group, since on
        another mesh groups would be others; TypeError for what JSON cannot say.
        """
        raise NotImplementedError(
            "mesh.mesh_checkpoint: Save parameters, the optimizer's state and its hyperparameters"
        )

    def load(self, parallel: Placed, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite parameters, the optimizer's state and its hyperparameters with what was saved; return `extra`.

        Hyperparameters that are tuples, as betas, come back as tuples, which JSON does not know.
        Rows that pad the vocabulary, of which another mesh has more or fewer, are dropped, or are zeros. Tensors are
        put together one after the other: beside its own a rank holds at any moment at most two of the whole model's.

        Raises FileNotFoundError where nothing was saved; ValueError unless the optimizer has one group and, before
        anything of this rank is overwritten, where the config is not the saved one, or where one of its parameters was
        not saved or has another shape, as with more experts, or fewer.
        """
        raise NotImplementedError(
            "mesh.mesh_checkpoint: Overwrite parameters, the optimizer's state and its hyperparameters with what was …"
        )
