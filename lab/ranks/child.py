"""Runs one probe in a fresh process: installs the device, loads the implementation, calls the probe, sends the result.

The zygote forks a child for one probe and one rank. The child never returns from `answer`.
"""

import contextlib
import importlib
import os
import random
import select
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..solution import framing, wire
from ..solution import impl as implementation
from ..solution.forbidden import ForbiddenCall
from . import frames
from .port import SwitchConnection
from .watch import Watch

FRAMES = 12
BUSY_FACTOR = 10  # on a busy machine, a probe may take this many times its limit
shared = ""  # the folder that all ranks of this probe share; "" if the probe did not ask for one
# These modules take as long to import as all of torch, and many probes never use them. backward() with an explicit
# gradient needs the first module. An optimizer's first step and checkpoints need both modules.
LATE_MODULES = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")


@dataclass(frozen=True)
class Job:
    """The request that the runner sends to the zygote."""

    probe: str  # "tests.ddp.probes:train"
    impl: str  # the implementation's folder
    seed: int
    timeout_s: float  # time spent waiting for a core does not count
    world: int = 0  # 0: one process, no process group
    device: str = "real"  # or "simulated"
    replace: dict[str, str] = field(default_factory=dict)  # "ddp/naive.py:NaiveDDP" -> "lab.standins.ddp:naive"
    forbidden: list[str] = field(default_factory=list)  # dotted names that raise when the solution calls them
    files: list[str] | None = None  # files in the ranks' shared folder at the start; None: there is no shared folder
    private: bool = False  # whether peak_bytes excludes mapped files
    network: str = "switch"  # or "gloo"

    @property
    def limit_s(self) -> float:
        """Seconds after which we end the ranks, even if other processes have kept the cores busy."""
        return BUSY_FACTOR * self.timeout_s


def answer(job: Job, args: bytes, rank: int, reply: int, port: int, secret: str) -> None:
    """Run the probe as `rank`, and write its result and `secret` to `reply`. Never returns.

    port: descriptor of this rank's socket to the switch, or -1 without a switch. args: packed arguments, used only
    without a switch; otherwise the switch sends them first.
    """
    if any(name not in sys.modules for name in LATE_MODULES):
        sys.meta_path.insert(0, _LateFinder(reply, secret))
    try:
        value = run(job, wire.unpack(args if port < 0 else _receive_args(port)), rank, port, Watch(job.impl))
        blob = wire.pack(value)
        header: dict[str, Any] = {"ok": True}
    except BaseException as error:  # also report SystemExit from the code under test
        header, blob = {"ok": False, "error": describe(error, job.impl)}, b""
    with contextlib.suppress(framing.Closed):
        sys.stdout.flush()
        sys.stderr.flush()
        framing.send(reply, {**header, "secret": secret}, [blob])
        if job.world > 1 and header["ok"]:
            select.select([], [], [], job.limit_s)  # wait: the zygote kills all ranks together
    os._exit(0)


class _LateFinder:
    """An import finder that ends this rank when it begins to import one of LATE_MODULES.

    The zygote then imports the module, and forks all ranks again.
    """

    def __init__(self, reply: int, secret: str):
        self.reply, self.secret = reply, secret

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in LATE_MODULES:
            error = {"reason": "import", "type": "ImportError", "text": f"{name} is to be imported first", "frames": []}
            framing.send(self.reply, {"ok": False, "late": name, "error": error, "secret": self.secret}, [b""])
            os._exit(0)


def run(job: Job, args: Any, rank: int, port: int, watch: Watch | None = None) -> Any:
    """Run the probe in this process, and return its value.

    watch: refuses forbidden calls until the process ends. Pass None if the process does other work afterwards.
    """
    import torch

    from . import group

    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    # Without CUDA, torch.manual_seed would format a stack trace in case CUDA is initialized later; that takes time.
    (torch.manual_seed if torch.version.cuda else torch.default_generator.manual_seed)(job.seed)
    random.seed(job.seed)
    if job.device == "simulated":
        from ..measure import device

        simulated = device.SimulatedGPU().install()
    if job.world:
        if job.network == "gloo":
            group.join(rank, job.world, None, gloo=f"{shared}/gloo")
        else:
            group.join(rank, job.world, SwitchConnection(port))
    replace = {target: _stand_in(source) for target, source in job.replace.items()}
    module, _, name = job.probe.partition(":")
    probe = getattr(importlib.import_module(module), name)
    if watch:
        # after importing stand-ins and probes, which may use what the exercise forbids
        watch.guard(job.forbidden, stand_ins=bool(replace))
    value = probe(implementation.load(job.impl, replace), *args)
    if watch:
        watch.check()
    if job.device == "simulated":
        simulated.uninstall()  # results are sent as plain CPU tensors
    if job.world:
        group.finished()
    return value


def _receive_args(port: int) -> bytes:
    """Receive this rank's arguments, which the switch sends first."""
    with open(port, "rb", closefd=False) as stream:
        _, size = frames.receive(stream)
        return bytes(frames.read_into(stream, bytearray(size)))


def _stand_in(source: str) -> Any:
    module, _, name = source.partition(":")
    return getattr(importlib.import_module(module), name)


def describe(error: BaseException, impl: str) -> dict[str, Any]:
    """Return an exception as plain values: reason, type, text, and the innermost frames."""
    found = [*traceback.extract_tb(error.__traceback__)]
    if type(error).__name__ == "InterpreterError" and error.__cause__:  # Triton wraps the kernel's error
        error = error.__cause__
        found += traceback.extract_tb(error.__traceback__)
    text = str(error)[:4000]
    frames = [
        [Path(f.filename).relative_to(impl).as_posix() if f.filename.startswith(impl + os.sep) else f.filename,
         f.lineno or 0, f.name, (f.line or "")[:200]]
        for f in found
    ]  # fmt: skip
    if isinstance(error, SyntaxError) and error.filename:
        name = error.filename.removeprefix(impl + os.sep)
        text = f"{error.msg} ({name}, line {error.lineno}): {(error.text or '').strip()[:200]}"
    if isinstance(error, wire.WireError):
        reason = "refused"
    elif isinstance(error, ForbiddenCall):
        reason = "forbidden"
    elif isinstance(error, NotImplementedError) and _names_an_exercise(text):
        reason = "unwritten"
    elif getattr(error, "while_loading", None) or isinstance(error, implementation.ImplementationNotFound):
        reason = "import"
    else:
        reason = "raised"
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is not None:  # an error in a finally block hides the first error
            text += f" (after {type(before).__name__}: {str(before)[:300]})"
    return {"reason": reason, "type": type(error).__name__, "text": text, "frames": frames[-FRAMES:]}


def _names_an_exercise(text: str) -> bool:
    stage, dot, rest = text.partition(":")[0].partition(".")
    return bool(dot) and stage.isidentifier() and rest.isidentifier()
