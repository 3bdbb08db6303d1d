"""The real clocks, bound when this module is imported, before a simulated device replaces them.

Code of `lab` must use these clocks, so that timeouts and reports stay correct under simulation.
"""

import contextlib
import os
from time import monotonic, perf_counter, perf_counter_ns, process_time, sleep, thread_time, time

__all__ = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "sleep", "starved_s", "thread_time", "time"]


def starved_s() -> float:
    """Return the seconds that this process's threads have waited for a core; 0 if the kernel does not count them."""
    return time_on_cores()[1]


def time_on_cores(pid: int | str = "self") -> tuple[float, float]:
    """Return seconds that a process's threads ran, and seconds that they waited for a core; zeros if not reported.

    Source: proc(5), /proc/pid/task/tid/schedstat: nanoseconds on a core, and on a run queue.
    """
    ran = waited = 0
    with contextlib.suppress(OSError, ValueError):  # a thread may just have ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as stream:
                on_core, in_queue = map(int, stream.read().split()[:2])
            ran, waited = ran + on_core, waited + in_queue
    return ran / 1e9, waited / 1e9
