"""Which rank does everybody wait for? Found from each rank's own timings; no clock is compared with another."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Straggler:
    """rank: in the group. slowdown: its typical step over the median rank's. waiting_s: what each rank waits a step."""

    rank: int
    slowdown: float
    waiting_s: tuple[float, ...]


def find_straggler(samples: Sequence[float], group: dist.ProcessGroup | None = None) -> Straggler:
    """The rank whose steps take longest, the same answer on every rank of `group` (default: the world).

    samples: seconds that this rank computed in each step, at least one; ranks may have different numbers of them. A
    rank's typical step is the median of its samples: one slow step makes no straggler. The straggler is the rank with
    the longest typical step, the first of equals; slowdown is that over the median of all ranks' typical steps; a rank
    waits for the straggler's typical step less its own. The median of an even number is the mean of the middle two.
    One all-gather of one float64 a rank.
    """
    mine = torch.tensor([statistics.median(samples)], dtype=torch.float64)
    typical = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(typical, mine, group=group)
    seconds = [t.item() for t in typical]
    slowest = max(seconds)
    return Straggler(
        rank=seconds.index(slowest),
        slowdown=slowest / statistics.median(seconds),
        waiting_s=tuple(slowest - s for s in seconds),
    )
