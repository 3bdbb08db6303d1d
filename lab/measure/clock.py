"""The real clocks, taken when this module is imported: before a simulated device puts its own in their place.

`lab` reads the time here and nowhere else, so that its timeouts and reports stay true under simulation.
"""

from __future__ import annotations

from time import monotonic, perf_counter, perf_counter_ns, process_time, sleep, thread_time, time

__all__ = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "sleep", "thread_time", "time"]
