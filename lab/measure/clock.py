"""The real clocks, taken when this module is imported: before a simulated device puts its own in their place.

`lab` reads the time here and nowhere else, so that its timeouts and reports stay true under simulation.
"""

from __future__ import annotations

import os
from time import monotonic, perf_counter, perf_counter_ns, process_time, sleep, thread_time, time

__all__ = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "sleep", "starved_s", "thread_time", "time"]


def starved_s() -> float:
    """Seconds that threads of this process could have run and had no core, since they began; 0 where no kernel tells.

    Source: proc(5), /proc/pid/task/tid/schedstat, the second number: nanoseconds on a run queue.
    """
    total = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as stream:
                total += int(stream.read().split()[1])
    except (OSError, IndexError):  # another system, a kernel that does not count, a thread that has just ended
        pass
    return total / 1e9
