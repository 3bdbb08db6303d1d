"""The warm process that forks the ranks: `python -m lab.ranks.zygote`, requests on stdin, answers on stdout.

It imports torch once and never computes with it, because torch's threads do not survive a fork. Each request forks new
children, one per rank, so nothing leaks from probe to probe, and a crash in one probe harms no other. The zygote is
started as a new program, never forked from pytest.

Some of torch's modules are slow to import, and many probes never use them (child.LATE_MODULES). The zygote imports such
a module when a rank first needs it, and then forks that probe's ranks again.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import warnings

from ..solution import framing
from ..solution.framing import GIVE_UP
from . import alone, operators, processes, seccomp, watch
from .child import Job
from .launch import Isolation, World

MAX_RANKS = 250  # one message can carry this many descriptors
_HUGE_PAGES_AFTER = 64  # forks until we use huge pages, which takes 0.4 s and saves a few milliseconds per fork
# Modules that probes import. We import them once here instead of in each child. The last module is imported by the
# first launch with a tensor descriptor.
_PROBES = (
    "lab.measure.clock", "lab.harness.compare", "lab.measure.device", "lab.measure.kernels", "lab.measure.memory",
    "lab.measure.process", "lab.measure.reads", "lab.model.transformer", "lab.cluster.costs",
    "triton.language", "triton.runtime.interpreter", "triton.tools.tensor_descriptor",
    "triton.experimental.gluon.nvidia.hopper",
)  # fmt: skip


def main() -> None:
    """Serve until stdin closes."""
    requests, answers = os.dup(0), os.dup(1)
    request_socket = socket.socket(fileno=requests)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    gc.disable()  # garbage collection would take a quarter of the start-up time
    # In a sandbox with a user of its own, all visible processes are ours to kill. That never holds for root.
    sandbox = os.environ.get("SHARDLINGS_BOX", "")
    sandboxed = sandbox in ("bubblewrap", "uid") and os.geteuid() != 0
    _warm()
    gc.freeze()  # children must not copy these pages just to count references
    gc.enable()
    if sandboxed:
        processes.dumpable(False)  # otherwise a child could open this process's pipes through /proc
        processes.use_huge_pages()  # do it now, because later it would disturb memory measurements
    forks = _HUGE_PAGES_AFTER if sandboxed else 0
    lacking = alone.isolation_error() if sandbox == "bubblewrap" else ""
    compiles = not os.environ.get("TRITON_INTERPRET")  # then ranks start ptxas, a process
    isolation = Isolation(seccomp.program(rank=True, forks=compiles), not lacking) if sandbox == "bubblewrap" else None
    known = processes.processes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # raises, so that `finally` ends the ranks
    framing.send(answers, {"ready": True, "lacking": lacking})
    while True:
        try:
            byte, ports, *_ = socket.recv_fds(request_socket, 1, MAX_RANKS)
            if not byte:
                return
            if byte == GIVE_UP:  # too late: we have already answered the probe
                continue
            header, blobs = framing.receive(requests)
        except framing.Closed:
            return
        job = Job(**header)
        _prepare(job)
        world = World(job, blobs, list(ports), requests, isolation, known=known if sandboxed else None)
        ranks = world.run()
        leftover = False
        if sandboxed:
            if strays := world.strays | (processes.processes() - known):
                for rank in ranks:
                    rank.fail("error", "forbidden", f"a solution must not start processes: {len(strays)} still ran")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)  # all processes that a probe left running, including daemons
            leftover = processes.left_behind()
        if world.late_module:
            _import_late(world.late_module)
            framing.send(answers, {"again": True})
            continue
        summary = [
            {"outcome": r.outcome, "output": r.output.decode(errors="replace"), "peak_bytes": r.peak_bytes, **r.extra}
            for r in ranks
        ]
        extra = {"busy": world.busy_text, "seconds": world.seconds, "waited_s": world.waited_s, "files": [*world.files]}
        blobs = [*(r.blob for r in ranks), *world.files.values()]
        framing.send(answers, {"ranks": summary, "spent": leftover, **extra}, blobs)
        if leftover:
            return
        forks += len(ranks)
        if forks >= _HUGE_PAGES_AFTER > forks - len(ranks):
            processes.use_huge_pages()


def _warm() -> None:
    """Import what every child needs; compute nothing, start no thread."""
    import torch
    import torch.distributed
    import torch.utils._python_dispatch

    from ..measure.interpreter import patch_once
    from ..solution import impl, wire  # noqa: F401
    from . import group

    torch.set_num_threads(1)
    warnings.formatwarning = _in_one_line
    for name in _PROBES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        with contextlib.suppress(ImportError, AttributeError):
            patch_once()
    group.install()


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line, so that lab/harness/summary.py can distinguish it from printed output."""
    return f"{filename}:{lineno}: {category.__name__}: {' '.join(str(message).split())}\n"


def _import_late(name: str) -> None:
    """Import a module of LATE_MODULES in the zygote, so that children inherit it."""
    gc.disable()
    module = importlib.import_module(name)
    if name == "torch._dynamo":
        module.trace_rules.clear_lru_cache()  # as torch does for each new process group
    watch.refusals.cache_clear()
    gc.freeze()
    gc.enable()


def _prepare(job: Job) -> None:
    """Import the modules of probe and stand-ins, and look up forbidden objects, once for all later ranks."""
    before = len(sys.modules)
    for source in (job.probe, *job.replace.values()):
        with contextlib.suppress(Exception):  # the child will report the error
            importlib.import_module(source.partition(":")[0])
    if len(sys.modules) > before:
        watch.refusals.cache_clear()
        gc.freeze()
    with warnings.catch_warnings(action="ignore"):  # torch warns when some of its names are read
        watch.refusals(tuple(job.forbidden))
        operators.kernels(tuple(job.forbidden))


if __name__ == "__main__":
    with contextlib.suppress(framing.Closed, SystemExit):  # the client is gone, or has requested our end
        main()
    os._exit(0)  # skip torch's teardown, which takes half a second
