"""Asks an executor to run a probe, and returns its answer: `run(probe, *args, …)`."""

from __future__ import annotations

import atexit
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cluster.costs import Link
from ..course.scoring import REASONS
from ..ranks.child import Job
from ..ranks.reports import groups_that_differ, rank_states
from ..ranks.switch import Switch
from ..solution import framing, wire
from .executor import Executor as Executor
from .executor import Zygote
from .trace import Trace

PRINTED_LIMIT = 16 << 10  # we keep the last bytes that a test's probes print
OPTIONS = {"triton": ("interpret", "native"), "device": ("real", "simulated"), "network": ("switch", "gloo")}
PATIENCE_S = 40.0  # for all failing probes of one exercise: enough for two that hang, or many that crash
# Reasons that an executor may report. It does not judge, and does not know about failures of the kit.
REPORTABLE = frozenset(REASONS) - {"assertion", "kit"}


@dataclass(eq=False)
class ProbeFailed(Exception):
    """The probe returned no value."""

    reason: str  # one of scoring.REASONS, or "busy": other processes used the cores, so nothing is known
    text: str
    rank: int | None = None
    where: str = ""  # the innermost line of the code under test
    output: str = ""
    stacks: str = ""

    def __str__(self) -> str:
        return self.text

    def again(self) -> ProbeFailed:
        """The same failure for another probe, without the printed output."""
        return replace(self, output="")


class ExecutorLost(RuntimeError):
    """The executor itself failed, so nothing is known about the code under test."""


class Runner:
    """Runs probes of one implementation in one executor. Starts zygotes as needed, and replaces lost ones."""

    timeout_s = 30.0  # many times the usual duration of a probe

    def __init__(self, executor: Any, seed: str = "public", limit_s: float = math.inf, allowed: Collection[str] = ()):
        """limit_s: seconds for all probes together; after that, no more are run.

        allowed: names that this implementation may call although exercises forbid them.
        """
        self.executor, self.seed, self.limit_s, self.allowed = executor, seed, limit_s, allowed
        self.spent_s = 0.0
        self.zygotes: dict[str, Zygote] = {}
        self.wasted_s: defaultdict[str, float] = defaultdict(float)  # by exercise: seconds spent on failed probes
        self.broken: dict[str, ProbeFailed] = {}  # exercises whose file does not load
        self.verdicts: dict[str, bool] = {}  # whether prerequisites pass: lab.harness.verdicts
        self.printed = ""  # output of the code under test, in the running test
        atexit.register(self.close)

    def warm(self, triton: str = "interpret") -> Zygote:
        """Start the zygote of a Triton mode without waiting for it."""
        if triton not in self.zygotes:
            self.zygotes[triton] = Zygote(self.executor, triton)
        return self.zygotes[triton]

    def close(self) -> None:
        for zygote in self.zygotes.values():
            zygote.close()
        self.zygotes.clear()
        atexit.unregister(self.close)

    def run(self, probe: Callable[..., Any], *args: Any, world: int | None = None, **options: Any) -> Any:
        """Return the probe's value. With world=n, run n ranks in a process group, and return the n values in a list."""
        values = [trace.values for trace in self.trace(probe, *args, world=world, **options)]
        return values if world else values[0]

    __call__ = run

    def trace(
        self,
        probe: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        link: Link | None = None,
        gates: Mapping[str, list[float]] | None = None,
        hold: Sequence[tuple[str, ...]] = (),
        by_rounds: bool = False,
        folder: Mapping[str, bytes] | None = None,
        triton: str = "interpret",
        exercise: str = "",
        forbidden: Sequence[str] = (),
        **options: Any,
    ) -> list[Trace]:
        """Run a probe, and return a trace per rank; without world, a list with the trace of the single process.

        probe: a function `probe(impl, *args)` of a probes.py. lab.solution.wire must support its arguments and value.
        For an argument annotated as PerRank, each rank gets its own entry, and None in place of the others'.
        link: latency and bandwidth of each rank's messages, a lab.cluster.costs.Link; None: no delay.
        gates, hold, by_rounds: see lab.ranks.switch.Switch.
        folder: files by path; the ranks share a folder with them, lab.ranks.child.shared. None: there is no folder.

        options: those of `job`.
        device: "simulated" runs the probe on the simulated GPU of lab.measure.device.
        replace: stand-ins by object. In a test of an exercise they are those of prerequisites that do not pass.
        private: whether the trace's peak_bytes leaves out mapped files. Then memory is sampled once per millisecond.
        network: "gloo" uses torch's own Gloo. Then traces have no messages, gates give 1.0, and ranks that are
        isolated in a sandbox cannot connect.
        timeout: seconds, without the time in which the probe waits for a core.

        Raises ProbeFailed if a rank returns no value. Raises it at once if failing probes of this exercise have already
        taken 40 s, or all probes together limit_s.
        """
        if link is not None and (type(link) is not Link or not world):
            raise ValueError(f"link: expected a lab.cluster.costs.Link, and world=n ranks to join, got {link!r}")
        self._check_budget(exercise)
        forbidden = [name for name in forbidden if name not in self.allowed]
        folder = {} if folder is None and options.get("network") == "gloo" else folder
        files = None if folder is None else [*folder]
        job = self.job(probe, world, triton, forbidden=forbidden, files=files, **options)
        packed, start, header = _packed(probe, args, world or 1), time.monotonic(), dict[str, Any]()
        try:
            payload = [b"" if world else packed[0], *(folder or {}).values()]
            header, blobs, switch = self._ask(
                triton, job, payload, lambda: Switch(job.world, link, gates, hold, packed, by_rounds)
            )
            self.printed = (self.printed + _printed(header))[-PRINTED_LIMIT:]
            traces = _traces(header, blobs, switch, max(job.world, 1))
        except ProbeFailed as error:
            self.wasted_s[exercise] += _active_s(start, header)
            if error.reason == "import":
                self.broken[exercise] = error
            raise
        finally:
            self.spent_s += _active_s(start, header)
        return traces

    def _check_budget(self, exercise: str) -> None:
        """Raise at once if the exercise's file does not load, or if the probes have used up their time."""
        if exercise in self.broken:
            raise self.broken[exercise].again()
        if exercise and self.wasted_s[exercise] > PATIENCE_S:
            raise ProbeFailed(
                "hung", f"not run: failing probes of {exercise} have taken {self.wasted_s[exercise]:.0f} s"
            )
        if self.spent_s > self.limit_s:
            raise ProbeFailed(
                "hung", f"not run: all probes so far have taken {self.spent_s:.0f} s, of {self.limit_s:.0f} there are"
            )

    def forget(self) -> None:
        """Forget times, failures and verdicts of one implementation, before another one runs."""
        self.spent_s = 0.0
        self.wasted_s.clear()
        self.broken.clear()
        self.verdicts.clear()

    def job(
        self,
        probe: Callable[..., Any],
        world: int | None = None,
        triton: str = "interpret",
        timeout: float | None = None,
        replace: dict[str, str] | None = None,
        **options: Any,
    ) -> Job:
        """Make the request to the zygote. options: more fields of Job. Raises ValueError if one is not in OPTIONS."""
        for option, known in OPTIONS.items():
            if (requested := {"triton": triton, **options}.get(option, known[0])) not in known:
                raise ValueError(f"expected {' or '.join(map(repr, known))}, got {requested!r}")
        name = f"{probe.__module__}:{probe.__qualname__}"
        seed = int.from_bytes(hashlib.sha256(f"{self.seed}\0{name}".encode()).digest()[:4], "little")
        limit_s = timeout or self.timeout_s
        return Job(name, self.executor.impl, seed, limit_s, world or 0, replace=replace or {}, **options)

    def _ask(
        self, triton: str, job: Job, payload: list[bytes], make: Callable[[], Switch]
    ) -> tuple[dict, list[bytes], Switch]:
        """Run one probe in a zygote. If the zygote is lost, close it and raise ProbeFailed, or ExecutorLost."""
        zygote = self.warm(triton)
        try:
            zygote.wait()
            header, blobs, switch = zygote.ask(job, payload, make)
            if header.get("spent"):
                self.zygotes.pop(triton).close()
            return header, blobs, switch
        except (framing.Closed, framing.TimedOut, ValueError, OSError) as error:
            ready = zygote.ready
            self.zygotes.pop(triton).close()
            message = (self.executor.error_output(zygote.process).strip().splitlines() or ["nothing"])[-1]
            if not ready:
                raise ExecutorLost(f"the zygote did not start ({error}); it said: {message}") from None
            hung = isinstance(error, framing.TimedOut)
            text = "no answer in time, and the process that was to report it did not either" if hung else (
                "the code under test brought down the process that runs it"
            )  # fmt: skip
            raise ProbeFailed("hung" if hung else "crashed", text) from None


def _active_s(start: float, header: dict[str, Any]) -> float:
    """Seconds since `start`, without those in which the probe waited for a core."""
    return max(0.0, time.monotonic() - start - float(header.get("waited_s", 0.0)))


def _packed(probe: Callable[..., Any], args: tuple, world: int) -> list[bytes]:
    """Pack the arguments of each rank's probe, without the implementation."""
    names = probe.__code__.co_varnames[1 : probe.__code__.co_argcount]
    split = [probe.__annotations__.get(name) in ("PerRank", wire.PerRank) for name in names][: len(args)]
    if not any(split):
        return [wire.pack(args)] * world
    pairs = list(zip(args, split + [False] * (len(args) - len(split)), strict=True))
    return [
        wire.pack(
            tuple([v if r == rank else None for r, v in enumerate(arg)] if per_rank else arg for arg, per_rank in pairs)
        )
        for rank in range(world)
    ]


def _traces(header: dict, blobs: list[bytes], switch: Switch, world: int) -> list[Trace]:
    """Return a trace per rank. Raises ProbeFailed for the most important failure of a rank."""
    ranks, names = header.get("ranks"), header.get("files", [])
    if type(ranks) is not list or type(names) is not list or [len(ranks), len(blobs)] != [world, world + len(names)]:
        raise ProbeFailed("refused", "malformed answer")
    files = {str(name): blob for name, blob in zip(names, blobs[world:], strict=True)}
    if header.get("busy"):
        raise ProbeFailed("busy", str(header["busy"])[:200])
    failures = [(_severity(r), i) for i, r in enumerate(ranks) if r.get("outcome") != "ok"]
    if failures:
        _, i = max(failures, key=lambda f: (f[0], -f[1]))
        raise _failure(ranks, switch, i, world)
    try:
        values = [wire.unpack(blob) for blob in blobs[:world]]
    except wire.WireError as error:
        raise ProbeFailed("refused", f"malformed answer: {error}") from None
    if switch.refused:
        raise ProbeFailed("refused", switch.refused)
    if differ := groups_that_differ(switch.ranks):
        raise ProbeFailed("hung", f"on Gloo and NCCL these ranks would wait for each other for ever: {differ}")
    peaks, seconds = [int(rank.get("peak_bytes", -1)) for rank in ranks], float(header.get("seconds", 0.0))
    if not switch.ranks:
        return [Trace(values[0], peaks[0], seconds, files=files)]
    return [
        Trace(
            value, peak, seconds, rank.rows, rank.payloads, rank.gates,
            [row for number, row in switch.stalls if number == rank.number], switch.rounds, files,
        )
        for value, peak, rank in zip(values, peaks, switch.ranks, strict=True)
    ]  # fmt: skip


def _printed(header: dict) -> str:
    """The output of all ranks. If it differs, each line begins with its rank's number."""
    ranks = header.get("ranks")
    outputs = [str(r.get("output", "")).splitlines() for r in ranks] if type(ranks) is list else []
    if not any(outputs):
        return ""
    if all(lines == outputs[0] for lines in outputs):
        return "".join(f"{line}\n" for line in outputs[0])
    return "".join(f"rank {n}: {line}\n" for n, lines in enumerate(outputs) for line in lines)


def _severity(rank: dict) -> int:
    """How severe a failure is: a stub most, then a rank's own error, a crash, a hang, and an error for a lost peer."""
    error = rank.get("error") or {}
    if error.get("reason") == "unwritten":
        return 9
    lost_peer = "onnection" in str(error.get("text", ""))
    return {"error": 2 if lost_peer else 6, "died": 5, "hung": 3}.get(str(rank.get("outcome")), 0)


def _failure(ranks: list[dict], switch: Switch, i: int, world: int) -> ProbeFailed:
    error = ranks[i].get("error") or {}
    reason, text = str(error.get("reason")), str(error.get("text", ""))[:4000]
    reason = reason if reason in REPORTABLE else "crashed"
    frames = _frames(ranks[i])
    if reason == "hung":  # rank i may wait in the probe for another rank
        frames = next((found for rank in ranks if (found := _frames(rank)) and _in_solution(found[-1])), frames)
    where = f"{frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]}: {frames[-1][3]}".rstrip(": ") if frames else ""
    if reason in ("raised", "import") and error.get("type") not in (None, "", "ImplementationNotFound"):
        text = f"{error['type']}: {text}"
    if frames and not _in_solution(frames[-1]):
        if reason == "raised" and str(error.get("type")) in ("AttributeError", "TypeError"):
            text += f": {_RETURN_HINT}"
        if reason == "import":
            where = ""  # a line of Python itself, or of the probe
    stacks = ""
    mismatch = switch.mismatch
    if reason == "hung":
        text = switch.hang or (rank_states(switch) if switch.ranks else text)
        stacks = "\n".join(_stack(n, r) for n, r in enumerate(ranks))
    if reason == "crashed" and world > 1:
        text += f" ({rank_states(switch)})"
    if mismatch and mismatch not in text and reason in ("hung", "crashed", "raised"):
        text += f"\n{mismatch}"
    output = str(ranks[i].get("output", ""))[:16384]
    return ProbeFailed(reason, text, i if world > 1 else None, where, output, stacks)


def _stack(number: int, rank: dict) -> str:
    lines = [f"  {f[0]}:{f[1]} in {f[2]}" for f in _frames(rank)[-6:]]
    return "\n".join([f"rank {number}: {rank.get('outcome')}", *lines])


_RETURN_HINT = "the test could not use the value that your code returned: is there a return, and is the name right?"


def _frames(rank: dict) -> list[list]:
    """A rank's frames in the solution; if there are none, those in the probe; otherwise all."""
    frames = [f for f in (rank.get("error") or {}).get("frames", []) if type(f) is list and len(f) == 4]
    probes = [f for f in frames if "tests" in Path(str(f[0])).parts]
    return [f for f in frames if _in_solution(f)] or probes or frames


def _in_solution(frame: list) -> bool:
    return not str(frame[0]).startswith(("/", "<"))
