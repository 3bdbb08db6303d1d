"""Wraps get_ddp_bucketed. It takes the bucket size in MB; we pass it in units of 2**20 bytes."""

from typing import Any

from torch import nn

from ..fork import adapter
from .harness import Wrapped

_wrap = adapter("ddp.bucketed", "get_ddp_bucketed")
_after = adapter("ddp.bucketed", "ddp_bucketed_on_after_backward")
_start = adapter("ddp.bucketed", "ddp_bucketed_on_train_batch_start")


class BucketedDDP(Wrapped):
    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20, group: Any = None):
        super().__init__(module, lambda m: _wrap(m, bucket_bytes / (1 << 20)), _after, _start, group)
