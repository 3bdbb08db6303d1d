"""Find the rank that all others wait for, from each rank's own timings, without comparing clocks of two ranks."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Straggler:
    """rank: in the group. slowdown: its typical step over the median rank's. waiting_s: each rank's wait per step."""

    rank: int
    slowdown: float
    waiting_s: tuple[float, ...]


def find_straggler(samples: Sequence[float], group: dist.ProcessGroup | None = None) -> Straggler:
    """Return the rank whose steps take longest; the result is the same on every rank of `group` (default: the world).

    samples: seconds that this rank computed in each step; at least one, and ranks may have different numbers of them. A
    rank's typical step is the median of its samples, so one slow step does not make a straggler. The straggler is the
    rank with the longest typical step; on a tie, the lowest rank. slowdown divides that by the median of all ranks'
    typical steps. A rank waits for the difference between the straggler's typical step and its own. The median of an
    even number of values is the mean of the middle two. Use one collective, of at most one float64 per rank.
    """
    local = torch.tensor([statistics.median(samples)], dtype=torch.float64)
    typical = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(typical, local, group=group)
    seconds = [t.item() for t in typical]
    slowest = max(seconds)
    return Straggler(
        rank=seconds.index(slowest),
        slowdown=slowest / statistics.median(seconds),
        waiting_s=tuple(slowest - s for s in seconds),
    )
