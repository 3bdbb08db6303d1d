"""`grader doctor`: finds what a machine lacks for grading, and how to fix it. `lab.commands.doctor` checks the rest."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from lab.commands import doctor
from lab.commands.doctor import GIB, Finding, output
from lab.ranks import seccomp

from . import schedulers
from .sandbox import Limits, available, cgroups


def examine() -> Iterator[Finding]:
    yield from isolation()
    yield from kernel()
    yield from doctor.software()
    yield from slurm()
    yield from free_space()


def isolation() -> Iterator[Finding]:
    """Whether each isolation works here. Grading needs one that contains hostile code: bubblewrap or uid."""
    problems = available()
    isolated = not (problems["bubblewrap"] and problems["uid"])
    for kind in ("bubblewrap", "uid"):
        why, _, fix = problems[kind].rpartition(";") if problems[kind] else ("", "", "")
        fatal = kind == "bubblewrap" and not isolated
        if kind == "uid" and not problems["bubblewrap"]:
            fix = ""  # bubblewrap works, so uid is not needed
        elif kind == "bubblewrap" and why and not fatal:
            fix = f"{fix.strip()}; until then: --isolation uid, which leaves the network open"
        yield Finding(f"isolation {kind}", why or "works", fix.strip(), fatal)
    yield Finding("isolation process", "works, and hides nothing: for honest code only")


def kernel() -> Iterator[Finding]:
    if sys.platform != "linux":
        yield Finding("kernel", platform.system(), "boxes need Linux: grade in a virtual machine or a container")
        return
    yield Finding("kernel", f"Linux {platform.release()}")
    filtered, known = Path("/proc/sys/kernel/seccomp/actions_avail").exists(), bool(seccomp.program())
    state = "there" if filtered else "not there"
    fix = "" if filtered and known else "boxes work without a system-call filter; nested namespaces are not refused"
    yield Finding("seccomp", state if known else f"{state}, system calls of {platform.machine()} not known", fix)
    yield _cgroups()


def _cgroups() -> Finding:
    kinds = {"v2" if kind == "cgroup2" else "v1" for kind, _, _ in cgroups.hierarchies()}
    versions, lacking = " and ".join(sorted(kinds)) or "none", " and ".join(cgroups.lacking())
    if not lacking:
        return Finding("cgroups", f"{versions}: memory and processes of a whole box are limited")
    fix = "run as root" if os.geteuid() else "mount a hierarchy with memory and pids, writable; docker: --privileged"
    return Finding("cgroups", f"{versions}: no {lacking} limit for a whole box, only a process", fix)


def slurm() -> Iterator[Finding]:
    """Whether `--cluster slurm` works, and on which partitions."""
    if not any(map(shutil.which, schedulers.COMMANDS)):
        yield Finding("Slurm", "none", "needed for --cluster slurm only")
        return
    what, fix = schedulers.lacking("slurm")
    if what:
        yield Finding("Slurm", what, fix)
        return
    yield Finding("Slurm", output(["sinfo", "--version"]).strip().removeprefix("slurm ") or "answers")
    rows = [line.split("|") for line in output(["sinfo", "--noheader", "--format=%P|%a|%D|%T|%G"]).splitlines()]
    partitions = [r for r in rows if len(r) == 5]
    for name, avail, nodes, state, gres in partitions:
        down = avail != "up" or state.rstrip("*~#!%$@^-") in ("down", "drained", "draining", "drain", "fail", "inval")
        fix = "look at: sinfo -R; scontrol update nodename=… state=resume" if down else ""
        gpus = f", {gres}" if "gpu" in gres else ""
        yield Finding(f"partition {name}", f"{avail}, {nodes} nodes {state}{gpus}", fix)
    if not partitions:
        yield Finding("partitions", "none", "look at: sinfo")
    elif not any("gpu" in r[4] for r in partitions):
        yield Finding("GPUs in Slurm", "none as gres", "leave --gpus out: the gpu track is not run")


def free_space() -> Iterator[Finding]:
    """Whether cores, memory and disk suffice for several sandboxes at once."""
    limits = Limits()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", str(cores), "" if cores > 1 else "times of two ranks stay inconclusive on one core")
    memory = psutil.virtual_memory().total
    boxes = memory // limits.memory_bytes
    fix = f"--jobs {max(1, boxes)} at most: a box may hold {limits.memory_bytes // GIB} GiB" if boxes < cores else ""
    yield Finding("memory", f"{memory / GIB:.1f} GiB", fix)
    for where, needed in ((Path(tempfile.gettempdir()), 1), (Path.cwd(), 1), (Path("/dev/shm"), 0.25)):
        if where.is_dir():
            free = shutil.disk_usage(where).free / GIB
            full = free < needed
            fix = f"free {needed:g} GiB" + ("; docker run --shm-size=1g" if "shm" in str(where) else "") if full else ""
            yield Finding(f"room in {where}", f"{free:.1f} GiB free", fix, fatal=full and needed == 1 and free < 0.1)
