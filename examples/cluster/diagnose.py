"""First checks for a job that hangs or is slow: `torchrun --nproc-per-node 4 examples/cluster/diagnose.py`.

Lists the ranks, and checks that versions agree. Then it finds ranks that miss a barrier and ranks that compute slowly,
and measures all-reduces. `--absent 2` and `--slow 1` simulate a rank in trouble.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

ROUNDS = 3  # a rank must be slow in each of these to be reported
SAME = ("torch", "python", "backend")  # facts that must be equal on all ranks


def main() -> None:
    """Run all checks. Rank 0 prints; each problem is a line that begins with "wrong"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--absent", type=int, help="this rank does not come to the barrier")
    parser.add_argument("--slow", type=int, help="this rank computes at half the speed")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds to wait at the barrier (default: 10)")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, problems = dist.get_rank(), []
    problems += describe_ranks()
    (settings,) = shared([vars(options)])
    log(f"settings, from rank 0: {settings}")
    missing = absent_ranks(options.patience, rank == options.absent)
    if missing:
        log(f"wrong: {missing}")
    else:
        problems += slow_ranks(rank == options.slow)
        all_reduces()
    for problem in problems:
        log(f"wrong: {problem}")
    sys.stdout.flush()
    os._exit(0)  # a group with a missing rank cannot be destroyed


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def describe_ranks() -> list[str]:
    """Print a line per machine. Return a problem for each fact of SAME that differs between ranks."""
    facts = {
        "host": platform.node(), "local": os.environ.get("LOCAL_RANK", "?"), "torch": torch.__version__,
        "python": platform.python_version(), "backend": dist.get_backend(), "gpus": torch.cuda.device_count(),
    }  # fmt: skip
    ranks: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, facts)
    for host in dict.fromkeys(r["host"] for r in ranks):
        members = [i for i, r in enumerate(ranks) if r["host"] == host]
        local = [ranks[i]["local"] for i in members]
        log(f"ranks {members} on one machine of {ranks[members[0]]['gpus']} GPUs, local ranks {local}")
    log(f"all: {', '.join(f'{name} {facts[name]}' for name in SAME)}")
    values = {name: Counter(str(r[name]) for r in ranks) for name in SAME}
    return [f"{name} differs between ranks: {dict(c)}; use one environment" for name, c in values.items() if len(c) > 1]


def shared(objects: list) -> list:
    """Return rank 0's objects on every rank."""
    dist.broadcast_object_list(objects, src=0)
    return objects


def absent_ranks(patience_s: float, is_absent: bool) -> str:
    """Return a text that names the ranks that missed the barrier, or ""; only rank 0 knows them."""
    dist.barrier()
    if is_absent:
        time.sleep(3 * patience_s)
        return "this rank stayed away"
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=patience_s), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def slow_ranks(half_speed: bool) -> list[str]:
    """Compute without messages. Report ranks that take more than 1.5 times the median rank in each of ROUNDS rounds.

    A rank's time is its shortest of many. If other processes take the core for a moment, only some times get longer; on
    a slow device, all do.
    """
    rounds = []
    for _ in range(ROUNDS):
        ranks = [0.0] * dist.get_world_size()
        dist.all_gather_object(ranks, shortest_s(half_speed))
        rounds.append(ranks)
    shortest = [min(times) for times in zip(*rounds, strict=True)]
    log("compute alone, ms: " + ", ".join(f"rank {i}: {1e3 * s:.2f}" for i, s in enumerate(shortest)))
    ratios = [[s / statistics.median_low(ranks) for s in ranks] for ranks in rounds]
    lowest = [min(rank_ratios) for rank_ratios in zip(*ratios, strict=True)]
    return [f"rank {i} computes at least {r:.1f} times as long as most" for i, r in enumerate(lowest) if r > 1.5]


def shortest_s(half_speed: bool) -> float:
    """Seconds of a few matrix products: the minimum of 30 measurements."""
    product, seconds = torch.ones(256, 256), []
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(8 * (1 + half_speed)):
            product = (product @ product).clamp(max=1.0)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def all_reduces() -> None:
    """Print, per size, an all-reduce's milliseconds and the MB/s that each rank sent."""
    world = dist.get_world_size()
    for size in (4 << 10, 1 << 20, 16 << 20):
        buffer, seconds = torch.ones(size // 4), []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            seconds.append(time.perf_counter() - start)
        median_s = statistics.median(seconds)
        rate = 2 * (world - 1) / world * size / median_s
        log(f"all-reduce of {size >> 10:,} KiB: {1e3 * median_s:.2f} ms, {rate / 1e6:,.0f} MB/s sent by each rank")


if __name__ == "__main__":
    main()
