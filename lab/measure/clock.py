"""The real clocks, bound when this module is imported, before a simulated device replaces them.

Code of `lab` must take the time from here, so that timeouts and reports stay right under simulation.
"""

import os
from time import monotonic, perf_counter, perf_counter_ns, process_time, sleep, thread_time, time

__all__ = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "sleep", "starved_s", "thread_time", "time"]


def starved_s() -> float:
    """Seconds that this process's threads have waited for a core, since they began; 0 if the kernel does not count.

    Source: proc(5), /proc/pid/task/tid/schedstat, the second number: nanoseconds on a run queue.
    """
    total = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as stream:
                total += int(stream.read().split()[1])
    except (OSError, IndexError):  # no Linux, no statistics in this kernel, or the thread has just ended
        pass
    return total / 1e9
