"""Checkpoints of a sharded training state: saved by any number of ranks, loaded by any other number, atomically."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Checkpoint:
    """A folder with the training state as it was last saved: parameters, buffers, optimizer.

    Tensors are in safetensors files, everything else is JSON, and nothing is pickled. An index names the files of the
    checkpoint. It is replaced atomically (os.replace) once all of them are written, so a process that is killed while
    saving, at any moment, leaves the previous checkpoint intact. All ranks of `group` (default: the world) call
    save and load together, on a folder that all of them see.
    """

    def __init__(self, folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None):
        """folder: created by the first save if it does not exist."""
        raise NotImplementedError("zero.state_dict: write Checkpoint.__init__")

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
        raise NotImplementedError(
            "zero.state_dict: Save `module` and an `optimizer` of its parameters, whose `state` on each rank has that …"
        )

    def load(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite `module` and `optimizer` with the saved state, from any number of ranks; return `extra`.

        The optimizer loads the whole state and keeps the part of its own tensors. Raises FileNotFoundError if nothing
        was saved. Raises ValueError, before anything is overwritten, if the names or shapes of parameters and buffers,
        or the names in the optimizer's groups, differ from the saved ones.
        """
        raise NotImplementedError(
            "zero.state_dict: Overwrite `module` and `optimizer` with the saved state, from any number of ranks"
        )
