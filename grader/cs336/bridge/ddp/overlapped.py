"""Wraps get_ddp_individual_parameters (2025) or get_ddp (2026)."""

from typing import Any

from torch import nn

from ..fork import adapter
from .harness import Wrapped

_wrap = adapter("ddp.overlapped", "get_ddp_individual_parameters", "get_ddp")
_after = adapter("ddp.overlapped", "ddp_individual_parameters_on_after_backward", "ddp_on_after_backward")


class OverlappedDDP(Wrapped):
    def __init__(self, module: nn.Module, group: Any = None):
        super().__init__(module, _wrap, _after, None, group)
