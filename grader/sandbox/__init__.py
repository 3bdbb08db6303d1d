"""The sandbox of a student's process. The process sees only its submission, `lab` and the probes.

with Sandbox(choose(None), submission, kit) as sandbox:
    zygote = sandbox.open(["-m", "lab.ranks.zygote"], env={"OMP_NUM_THREADS": "1"})
    ...                     # talk over zygote.stdin and zygote.stdout
    sandbox.kill(zygote)
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from grader.sandbox import bubblewrap, fallback
from grader.sandbox.cgroups import owner_tag, sweep
from grader.sandbox.limits import Identity, Limits, SandboxError

__all__ = ["ISOLATIONS", "Limits", "Sandbox", "SandboxError", "available", "choose"]

ISOLATIONS = ("bubblewrap", "uid", "process")


class Sandbox:
    """The grader's executor (see `lab.harness.executor`): each `open` starts a new box with one Python process.

    The needed parts of `kit` (lab/, tests/**/probes*.py) and the submission (`source`) are copied once. Processes in a
    box can only read the copies, at `kit_path` and `impl`. `notes` lists limits that this machine could not enforce,
    once per occurrence. Call `open` from a thread that outlives the box: Linux kills the box when the thread ends.
    """

    def __init__(
        self, isolation: str, submission: Path, kit: Path, limits: Limits | None = None, python: str = sys.executable
    ):
        if isolation not in ISOLATIONS:
            raise SandboxError(f"expected an isolation among {', '.join(ISOLATIONS)}, got {isolation!r}")
        self.isolation, self.source, self.limits, self.python = isolation, submission, limits or Limits(), python
        self.notes: list[str] = []
        self._boxes: dict[subprocess.Popen[bytes], bubblewrap.Box | fallback.Box] = {}
        self._tails: dict[subprocess.Popen[bytes], _Tail] = {}
        self._group: Identity | None = None
        self._hidden = [p.resolve() for p in (kit, submission.parent, Path.home())]
        if not (kit / "lab").is_dir() or not submission.is_dir():
            missing = submission if (kit / "lab").is_dir() else kit / "lab"
            raise SandboxError(f"expected a folder at {missing}, there is none; check the path")
        sweep()
        self._root = Path(tempfile.mkdtemp(prefix=owner_tag()))
        self._staged = self._root / "kit"
        try:
            _stage(kit, submission, self._staged)
            if isolation == "uid":  # only its own group may enter, because other boxes run at the same time
                self._group = Identity()  # held until close, so that no other box gets it
                os.chown(self._root, 0, self._group.uid)
                self._root.chmod(0o750)
        except BaseException:
            self.close()
            raise
        mounted = isolation == "bubblewrap"
        self.kit_path = bubblewrap.KIT if mounted else str(self._staged)
        self.impl = bubblewrap.SUBMISSION if mounted else str(self._staged / "impl")

    def open(self, args: list[str], env: dict[str, str], stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start `python *args` in a box, with `env` and a minimal environment. Stdout and, by default, stdin are pipes.

        Its working folder is its private /tmp. Raises SandboxError if the box does not start.
        """
        user_site = [str(p) for p in bubblewrap.interpreter(self.python)[1] if p.is_relative_to(Path.home() / ".local")]
        full = {  # user_site: its packages, which Python would not find under another HOME
            "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp",
            "PYTHONPATH": os.pathsep.join([self.kit_path, *user_site]), "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "SHARDLINGS_BOX": self.isolation, **env,
        }  # fmt: skip  # SAFEPATH: the student can write files into the working folder; they must not shadow modules
        tail = _Tail()
        rest = (self.limits, self.python, args, full, stdin, tail.write_end, self.notes)
        box: bubblewrap.Box | fallback.Box
        try:
            if self.isolation == "bubblewrap":
                box = bubblewrap.Box(self._staged, self._hidden, *rest)
            else:
                box = fallback.Box(self._staged, self.isolation == "uid", *rest)
        finally:
            tail.start()
        self._boxes[box.process], self._tails[box.process] = box, tail
        if not box.started:
            self.kill(box.process)
            message = (self.error_output(box.process).strip().splitlines() or ["no message"])[-1]
            action = f"{self.isolation} to start {self.python}"
            raise SandboxError(f"expected {action}, it ended: {message}; run: grader doctor")
        return box.process

    def note(self, text: str) -> None:
        """Record an isolation that this machine lacks."""
        self.notes.append(text)

    def error_output(self, process: subprocess.Popen[bytes]) -> str:
        """Return the last 64 KiB of standard error. It is for people to read; never use it as evidence."""
        tail = self._tails[process]
        if process.poll() is not None:
            tail.join(2.0)
        return tail.data.decode(errors="replace")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill `process` and everything it started. Its pipes stay open, so that a reader reaches end of file."""
        if box := self._boxes.pop(process, None):
            box.end()

    def close(self) -> None:
        for process in list(self._boxes):
            self.kill(process)
        shutil.rmtree(self._root, ignore_errors=True)
        if self._group:
            self._group.release()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def available() -> dict[str, str]:
    """Return isolation → "" if it works on this machine, else the reason and a command that helps."""
    return {"bubblewrap": bubblewrap.why_not(), "uid": fallback.why_not_uid(sys.executable), "process": ""}


def choose(isolation: str | None, local: bool = True) -> str:
    """Return the isolation to use, bubblewrap unless `isolation` names one. Raises SandboxError if it does not work.

    local: whether boxes will run on this machine; each node of a cluster checks for itself.
    """
    if isolation is not None and isolation not in ISOLATIONS:
        raise SandboxError(f"expected an isolation among {', '.join(ISOLATIONS)}, got {isolation!r}")
    reason = available()[isolation or "bubblewrap"] if local else ""
    if reason:
        weaker = "; or pass --isolation uid|process and accept less" if isolation in (None, "bubblewrap") else ""
        raise SandboxError(f"no {isolation or 'bubblewrap'} isolation: {reason}{weaker}")
    return isolation or "bubblewrap"


def _stage(kit: Path, submission: Path, staged: Path) -> None:
    """Copy the files that a box may see, and make them readable for all users. Does not follow links."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        """Return entries that are neither file nor folder, and files that Python compiled from the submission."""
        entries = [*map(Path(folder).joinpath, names)]
        plain = {p.name for p in entries if (p.is_file() or p.is_dir()) and not p.is_symlink()}
        return {*names} - plain | ({"__pycache__"} if Path(folder).is_relative_to(submission) else set())

    for source, name in ((kit / "lab", "lab"), (submission, "impl")):
        shutil.copytree(source, staged / name, ignore=ignored)  # keeps mtimes, so that lab's __pycache__ stays valid
    probes = [*(kit / "tests").glob("*/probes*.py")]
    for file in {kit / "tests" / "__init__.py", *probes, *(p.with_name("__init__.py") for p in probes)}:
        if file.is_file():
            (staged / file.relative_to(kit)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, staged / file.relative_to(kit))
    for path in (staged, *staged.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


class _Tail(threading.Thread):
    """Reads a pipe to its end and keeps the last 64 KiB."""

    def __init__(self) -> None:
        super().__init__(name="stderr of a sandbox", daemon=True)
        self.read_end, self.write_end = os.pipe()
        self.data = b""

    def run(self) -> None:
        os.close(self.write_end)  # the child has its own copy by now
        with open(self.read_end, "rb", buffering=0) as stream:
            while block := stream.read(1 << 16):
                self.data = (self.data + block)[-(1 << 16) :]
