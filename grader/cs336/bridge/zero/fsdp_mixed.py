"""get_fsdp with a compute_dtype."""

from typing import Any

import torch
from torch import nn

from .fsdp_gather import FSDP


class FSDPMixed(FSDP):
    def __init__(self, module: nn.Module, group: Any = None, *, compute_dtype: torch.dtype = torch.bfloat16):
        super().__init__(module, group, compute_dtype=compute_dtype)
