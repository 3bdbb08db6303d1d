"""Wraps get_fsdp with bfloat16 as compute_dtype."""

import functools

import torch

from .fsdp_gather import FSDP

FSDPMixed = functools.partial(FSDP, compute_dtype=torch.bfloat16)
