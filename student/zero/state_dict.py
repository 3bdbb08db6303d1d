"""Checkpoints of a sharded training state: from any number of ranks into any other, and never half a one."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Checkpoint:
    """A folder that holds the training state as it was last saved, whole: parameters, buffers, optimizer.

    Tensors are in safetensors files, all else is JSON; nothing is pickled. `index.json` names the files that belong to
    the checkpoint, and is replaced in one moment (os.replace) when all of them are on the disk: whoever is killed while
    saving, at whatever moment, leaves the checkpoint that was there. All ranks of `group` (default: the world) call
    save and load together, on a folder that all of them see.
    """

    def __init__(self, folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None):
        """folder: made by the first save if it is not there."""
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

        gathered=False: every rank writes one file, with the state that it has and a share of the parameters; no tensor
        is sent. gathered=True: rank 0 receives them and writes one file with all. extra: what else is to come back,
        such as a scheduler's state_dict; anything that JSON can say. Files of earlier saves, failed ones too, are
        removed at the end.
        """
        raise NotImplementedError(
            "zero.state_dict: Save `module` and an `optimizer` of its parameters, whose `state` on each rank has that …"
        )

    def load(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Overwrite `module` and `optimizer` with what was saved, by however many ranks; return `extra`.

        The optimizer is given the whole state and keeps its own tensors' part. Raises FileNotFoundError where nothing
        was saved; ValueError, before anything is overwritten, where the names or shapes of parameters and buffers, or
        the names in the optimizer's groups, are not the saved ones.
        """
        raise NotImplementedError(
            "zero.state_dict: Overwrite `module` and `optimizer` with what was saved, by however many ranks"
        )
