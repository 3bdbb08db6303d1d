"""The probe of `benchmarks.dryrun`."""

import os
import resource
import time
from typing import Any

from lab.dryrun.rank import dry


def cost(impl: Any, step: dict, rank: int) -> dict[str, float]:
    """Dry-run on one core. Return elapsed seconds, CPU seconds, peak bytes of the process, and ledger rows."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    start, cpu = time.perf_counter(), time.process_time()
    report = dry(impl, step, rank)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "rows": report.count('"op":'),
    }
