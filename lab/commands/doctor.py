"""`lab doctor`: checks versions, Triton, the GPU, ranks and free space, and says what to do about each problem.

Both students and graders need these checks; `grader.doctor` adds those for graders. Each check returns findings.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..course.assignment import ROOT

GIB = 1 << 30
MEMORY_GIB, SHARED_GIB = 2.0, 0.25
PYTHON_S = 180.0  # enough for a cold import of torch on two busy cores
_MARK = "shardlings says: "


@dataclass(frozen=True)
class Finding:
    """One row of the report: what was checked, what was found, and what to do about it ("" if nothing)."""

    what: str
    found: str
    do: str = ""
    fatal: bool = False  # whether nothing works until this is fixed


def examine() -> Iterator[Finding]:
    """Run all checks for students."""
    resources = [*free_space()]  # measured first, since the other checks use memory
    yield from software()
    yield from resources


def software() -> Iterator[Finding]:
    """Run the checks for both students and graders, in parallel, since each imports torch in its own process."""
    with ThreadPoolExecutor() as pool:
        for found in pool.map(lambda check: [*check()], (versions, lambda: (triton(),), gpu, ranks)):
            yield from found


def report(findings: Iterable[Finding], out: Console, *, as_json: bool, well: str = "") -> int:
    """Print the findings, and `well` if there is nothing to do. Return the exit code: 1 if a finding is fatal."""
    found = list(findings)
    if as_json:
        print(json.dumps([vars(f) for f in found], indent=1))
    else:
        out.print(table(found))
        if well and not any(f.do or f.fatal for f in found):
            out.print(well, style="green")
    return 1 if any(f.fatal for f in found) else 0


def table(found: Iterable[Finding]) -> Table:
    """The findings as a table: fatal ones in red, others with something to do in yellow."""
    grid = Table("what", "found", "what to do about it", box=None, pad_edge=False, header_style="bold")
    for f in found:
        style = "red" if f.fatal else "yellow" if f.do else ""
        grid.add_row(*map(Text, (f.what, f.found, f.do)), style=style)
    return grid


def versions() -> Iterator[Finding]:
    """Compare Python and the main packages with pyproject.toml, and with the versions that CI pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = Version(platform.python_version())
    wanted = project["requires-python"]
    fits = Requirement(f"python{wanted}").specifier.contains(python, prereleases=True)
    yield Finding("python", str(python), "" if fits else f"use Python {wanted}: make env PYTHON=python3.12", not fits)
    ranges = {r.name: r for r in map(Requirement, project["dependencies"])}
    for name in ("torch", "triton", "numpy"):
        yield _version(name, ranges[name])


def _version(name: str, wanted: Requirement) -> Finding:
    """Check a package's version. One outside the supported range is fatal; one newer than CI's is only mentioned."""
    supported = wanted.marker is None or wanted.marker.evaluate()
    found = installed(name)
    if found is None and not supported:
        return Finding(name, f"no {name} for {platform.system()}", "its exercises are not run here; all else works")
    if found is None or not wanted.specifier.contains(found, prereleases=True):
        version = str(found or "not installed")
        return Finding(name, version, f"pip install '{name}{wanted.specifier}'; or: make env", True)
    pinned = _pinned(name)
    if pinned and found.release[:2] > pinned.release[:2]:
        return Finding(name, f"{found}, newer than {pinned}, which was tried", f"if odd things fail: {name}=={pinned}")
    return Finding(name, str(found))


def installed(name: str) -> Version | None:
    try:
        return Version(metadata.version(name))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None


def _pinned(name: str) -> Version | None:
    """The version in constraints.txt, which CI uses; None if a release has no such file."""
    path = ROOT / "constraints.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((Version(line.partition("==")[2]) for line in lines if line.startswith(f"{name}==")), None)


def triton() -> Finding:
    """Check that a kernel with a loop runs in the interpreter, which all Triton exercises need.

    With triton 3.6 and numpy 2.4, a loop fails if its bound is known only at run time.
    """
    if installed("triton") is None:
        return Finding("Triton's interpreter", "no Triton", "its exercises are not run here; all else works")
    answer = run_python(_KERNEL, {"TRITON_INTERPRET": "1"})
    if answer.get("sum") == 6:
        return Finding("Triton's interpreter", "runs a kernel")
    why = answer.get("error", f"a sum of {answer.get('sum')} instead of 6")
    return Finding("Triton's interpreter", f"does not run a kernel: {why}", "install the versions of constraints.txt")


_KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def sums(x, out, n):
    total = 0.0
    for i in range(0, n):
        total += tl.load(x + i)
    tl.store(out, total)
out = torch.zeros(1)
sums[(1,)](torch.arange(4.0), out, 4)
say({"sum": out.item()})
"""
_CUDA = """
import torch
cuda = torch.cuda
say({"built": torch.version.cuda or torch.version.hip, "devices": [
    {"name": p.name, "capability": [p.major, p.minor], "bytes": p.total_memory}
    for p in map(cuda.get_device_properties, range(cuda.device_count()))] if cuda.is_available() else []})
"""


def gpu() -> Iterator[Finding]:
    """Check the driver and its devices, and whether torch sees the same devices."""
    rows, seen = driver(), run_python(_CUDA)
    for i, (name, version, mig) in enumerate(rows):
        yield Finding(f"GPU {i}", f"{name}, driver {version}", _MIG if mig == "Enabled" else "")
    if "error" in seen:
        yield Finding("torch", f"does not load: {seen['error']}", "reinstall it: make env", True)
    elif seen["devices"]:
        d = seen["devices"][0]
        old = tuple(d["capability"]) < (8, 0)
        do = "below sm_80 bfloat16 is slow; `speed` is then a ratio to plain attention" if old else ""
        count = f"{len(seen['devices'])} × " if len(seen["devices"]) > 1 else ""
        sm = "".join(map(str, d["capability"]))
        yield Finding("GPU in torch", f"{count}{d['name']}, sm_{sm}, {d['bytes'] / 2**30:.0f} GiB", do)
    elif rows and seen["built"] is None:
        yield Finding("GPU in torch", "none: this torch is built without CUDA", "pip install a CUDA build of torch")
    elif rows:
        do = "compare the driver with what this torch needs; is CUDA_VISIBLE_DEVICES empty?"
        yield Finding("GPU in torch", f"none, though there is one: torch is built for CUDA {seen['built']}", do)
    else:
        yield Finding("GPU", "none", "exercises of the gpu track are not run; all else works")


_MIG = "MIG is on: torch sees a slice of it, and times are those of the slice; ask for a whole one to judge speed"


def ranks() -> Iterator[Finding]:
    """Check that two ranks connect over Gloo on the loopback, and that the zygote starts."""
    if installed("torch") is None:
        return  # `versions` has reported it
    from ..harness.executor import Executor, Zygote
    from ..solution import framing

    answer = run_python(_GLOO)
    if answer.get("sum") == 3:
        yield Finding("Gloo on loopback", "two ranks met")
    else:
        do = "let processes connect to 127.0.0.1: a firewall, a VPN or a container without a loopback forbids it"
        yield Finding("Gloo on loopback", str(answer.get("error", "a wrong sum")), do, True)
    start = time.monotonic()
    zygote = Zygote(Executor(ROOT / "student"), "interpret")
    try:
        zygote.wait()
        yield Finding("processes for tests", f"the first starts in {time.monotonic() - start:.1f} s")
    except (framing.Closed, framing.TimedOut, ValueError, OSError) as error:
        why = f"the first does not start: {error or type(error).__name__}"
        yield Finding("processes for tests", why, "python -m lab.ranks.zygote < /dev/null says why", True)
    finally:
        zygote.close()


_GLOO = """
import datetime, os, socket, torch, torch.distributed as dist
with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
total = torch.tensor([1.0 + rank])
dist.all_reduce(total)
if rank:
    os._exit(0)
os.wait()
say({"sum": total.item()})
"""


def free_space() -> Iterator[Finding]:
    """Check cores, free memory and shared memory. Tests that run several ranks at once need them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        "cores", str(cores), "" if cores > 1 else "timed tests of several ranks stay inconclusive on one core"
    )
    free = psutil.virtual_memory().available / GIB
    do = "" if free >= MEMORY_GIB else f"close something: tests of 16 ranks want {MEMORY_GIB:g} GiB"
    yield Finding("free memory", f"{free:.1f} GiB", do, fatal=free < MEMORY_GIB / 4)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        do = "" if free >= SHARED_GIB else f"want {SHARED_GIB:g} GiB: docker run --shm-size=1g; or remove what is there"
        yield Finding("/dev/shm", f"{free:.2f} GiB free", do)


def driver() -> list[tuple[str, str, str]]:
    """(name, driver version, MIG mode) of each device in nvidia-smi's list; empty if nvidia-smi is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,mig.mode.current", "--format=csv,noheader"]
    rows = [[cell.strip() for cell in line.split(",")] for line in output(query).splitlines()]
    return [(r[0], r[1], r[2]) for r in rows if len(r) == 3]


def output(command: list[str], timeout_s: float = 60.0) -> str:
    """The output of a command; "" if the command is missing, fails or takes too long."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


def run_python(code: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run `code` in a separate Python, and return the dict that it passes to say(); {"error": …} on a crash or hang."""
    with tempfile.TemporaryDirectory(prefix="shardlings-doctor-") as folder:
        file = Path(folder) / "asked.py"  # a file: Triton reads the source of its kernels
        file.write_text(f"def say(answer):\n    import json\n    print({_MARK!r} + json.dumps(answer))\n{code}")
        try:
            process = subprocess.run(
                [sys.executable, str(file)], capture_output=True, text=True, errors="replace", timeout=PYTHON_S,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in {PYTHON_S:.0f} s"}
    answers = [line.removeprefix(_MARK) for line in process.stdout.splitlines() if line.startswith(_MARK)]
    if answers:
        return json.loads(answers[-1])
    return {"error": (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200]}
