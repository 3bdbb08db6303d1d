"""The warm process that forks the ranks: `python -m lab.ranks.zygote`, requests on stdin, answers on stdout.

It imports torch once and never computes with it, so its children may. Each request forks fresh children, one a rank;
nothing leaks from probe to probe, and a crashed heap takes nothing down. It is exec'd, never forked from pytest.

Half of what torch imports, many probes never use. A box, which serves a whole submission, imports it at once; elsewhere
whoever waits for the first answer waits for that, so the first rank that wants it says so, and its ranks start anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import warnings

from ..solution import compiled, framing
from ..solution.framing import GIVE_UP
from . import alone, processes, seccomp
from .child import LATE, Job
from .launch import Walls, World

MOST_RANKS = 250  # descriptors that one message carries
_PAYS = 64  # forks, a few milliseconds gained on each: to gather huge pages takes 0.4 s
# What probes import, so that each child need not; Triton's last is imported by the first launch with a descriptor.
_PROBES = (
    "lab.measure.clock", "lab.harness.compare", "lab.measure.device", "lab.measure.kernels", "lab.measure.memory",
    "lab.measure.process", "lab.measure.reads", "lab.model.transformer", "lab.cluster.costs",
    "triton.language", "triton.runtime.interpreter", "triton.tools.tensor_descriptor",
    "triton.experimental.gluon.nvidia.hopper",
)  # fmt: skip


def main() -> None:
    """Serve until stdin closes."""
    requests, answers = os.dup(0), os.dup(1)
    asked = socket.socket(fileno=requests)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    gc.disable()  # it would look at every import's objects again and again, a quarter of the time
    # Alone with its children it may kill all it sees; as root it never is.
    box = os.environ.get("SHARDLINGS_BOX", "")
    boxed = box in ("bubblewrap", "uid") and os.geteuid() != 0
    _warm()
    if boxed:
        for name in LATE:
            _import_late(name)
    gc.freeze()  # children must not copy these pages just to count references
    gc.enable()
    if boxed:
        processes.dumpable(False)  # or a child could open this process's pipes through /proc
        processes.in_huge_pages()  # at once: later, a probe's watch over the box's memory would see it
    forks, gathered = 0, boxed
    lacking = alone.lacking() if box == "bubblewrap" else ""
    walls = Walls(seccomp.program(rank=True), not lacking) if box == "bubblewrap" else None
    known = processes.processes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # by way of whoever must end the ranks
    framing.send(answers, {"ready": True, "pid": os.getpid(), "lacking": lacking})
    while True:
        try:
            word, ports, *_ = socket.recv_fds(asked, 1, MOST_RANKS)
            if not word:
                return
            if word == GIVE_UP:  # it had been answered already
                continue
            header, blobs = framing.receive(requests)
        except framing.Closed:
            return
        job = Job(**header)
        _prepare(job)
        world = World(job, blobs[0], list(ports), requests, walls, known=known if boxed else None)
        ranks = world.run()
        if world.late:
            _import_late(world.late)
            framing.send(answers, {"again": True})
            continue
        left = False
        if boxed:
            if strays := world.strays | (processes.processes() - known):
                for rank in ranks:
                    world.refuse(rank, f"a solution starts no processes: {len(strays)} were still running", "forbidden")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)  # all that a probe left behind, daemons too
            left = processes.left_behind()
        summary = [
            {"outcome": r.outcome, "output": r.output.decode(errors="replace"), "peak_bytes": r.peak_bytes, **r.extra}
            for r in ranks
        ]
        framing.send(
            answers,
            {
                "ranks": summary,
                "hung": world.hung,
                "busy": world.busy,
                "seconds": world.seconds,
                "waited_s": world.waited_s,
                "spent": left,
            },
            [r.blob for r in ranks],
        )
        if left:
            return
        compiled.keep(world.compiled, job.impl)
        forks += len(ranks)
        if forks >= _PAYS and not gathered:
            processes.in_huge_pages()
            gathered = True


def _warm() -> None:
    """Import what every child needs; compute nothing, start no thread."""
    import torch
    import torch.distributed
    import torch.utils._python_dispatch

    from ..measure.interpreter import patch_once
    from ..solution import impl, wire  # noqa: F401
    from . import group

    torch.set_num_threads(1)
    warnings.formatwarning = _in_a_line
    for name in _PROBES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        with contextlib.suppress(ImportError, AttributeError):
            patch_once()
    group.install()


def _in_a_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as one line, for whoever reads what a rank printed to tell it from that."""
    return f"{filename}:{lineno}: {category.__name__}: {' '.join(str(message).split())}\n"


def _import_late(name: str) -> None:
    """Import one of LATE here, once, or every child would anew."""
    gc.disable()
    module = importlib.import_module(name)
    if name == "torch._dynamo":
        module.trace_rules.clear_lru_cache()  # as each process group does when it is made
    gc.freeze()
    gc.enable()


def _prepare(job: Job) -> None:
    """Import the probe's module and the stand-ins', which are the kit's own, once for all ranks and all probes."""
    before = len(sys.modules)
    for source in (job.probe, *job.replace.values()):
        with contextlib.suppress(Exception):  # whoever asks for it is told by the child
            importlib.import_module(source.partition(":")[0])
    if len(sys.modules) > before:
        gc.freeze()


if __name__ == "__main__":
    with contextlib.suppress(framing.Closed, SystemExit):  # whoever asked has gone, or wants no more
        main()
    os._exit(0)  # to take torch apart before would take half a second
