"""Whatever another exercise builds on has a stand-in, and it can be made of a solution's module."""

from __future__ import annotations

import importlib

import pytest

from lab import standins
from lab.course.assignment import default

# The kernels are three parts of one function, and no other code runs without them.
KERNELS = {f"flash_attention.{part}" for part in
           ("triton_forward", "triton_backward_dq", "triton_backward_dkdv", "compiles_for_hopper")}  # fmt: skip
NEEDED = {id for e in default().exercises.values() for id in e.needs} - KERNELS


@pytest.mark.parametrize("id", sorted(NEEDED))
def test_there_is_one_and_it_can_be_made(id):
    module, _, name = standins.source(id).partition(":")
    file, _, _ = default().exercises[id].object.partition(":")
    solution = importlib.import_module("reference." + file.removesuffix(".py").replace("/", "."))
    assert getattr(importlib.import_module(module), name)(solution) is not None
