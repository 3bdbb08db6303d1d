"""What runs to try the witnesses: collectives of a known size, and instruments that are moved."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from lab.measure.memory import meter


def hoard(impl: Any, megabytes: int, metered: bool) -> dict:
    """Hold some memory while torch's is metered: torch's own, or what the meter does not see."""
    with meter() as memory:
        kept = torch.ones(megabytes << 18) if metered else numpy.ones(megabytes << 17)
        del kept
    return memory.plain()
