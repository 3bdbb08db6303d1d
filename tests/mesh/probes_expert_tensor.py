"""Runs experts that are cut over ranks forward and backward, and measures what they keep."""

from __future__ import annotations

import torch

from lab.harness.raising import raised
from lab.model.transformer import Config

from .probes_tensor import counted, group_of, ones, through


def whole(impl, sizes: dict, numbers: list[int]):
    return impl.mesh.moe.Experts(Config(**sizes), numbers)


def cut(impl, sizes: dict, numbers: list, state: dict, x: list, dy: list, counts: list, groups: list) -> dict:
    """Rows through the experts, forward and backward; x, dy and counts are of this rank's group."""
    group, experts = group_of(groups), whole(impl, sizes, numbers)
    place = next((i for i, g in enumerate(groups) if torch.distributed.get_rank() in g), 0)
    experts.load_state_dict(state)
    return through(
        impl.mesh.expert_tensor.TensorParallelExperts(experts, group), {"x": x[place]}, dy[place], counts[place]
    )


def kept(impl, kind: str, sizes: dict, numbers: list, ballast: int) -> dict:
    """Make a rank's part of experts of ones; then let the process grow by the ballast."""
    return counted(impl.mesh.expert_tensor.TensorParallelExperts(ones(whole(impl, sizes, numbers))), ballast)


def refused(impl, sizes: dict) -> str:
    experts = whole(impl, sizes, [0])
    return raised(lambda: impl.mesh.expert_tensor.TensorParallelExperts(experts))
