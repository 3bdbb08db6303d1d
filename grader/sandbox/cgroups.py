"""Control groups: what a whole box may use, whoever in it uses it.

Names of things that outlive a crash (cgroups, temporary folders) carry their grader's identity, so that the next
grader can sweep those of dead ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from grader.sandbox.limits import Limits


class ControlGroup:
    """The cgroups of one box (v1: one in the pids and one in the memory hierarchy; v2: one); may be none at all."""

    _counter = itertools.count()

    def __init__(self, limits: Limits, notes: list[str]):
        """Create and limit what can be; what cannot is recorded in `notes`."""
        self.folders: list[Path] = []
        pids, memory = str(limits.processes + 8), str(limits.memory_bytes)  # 8: bwrap, setpriv, the trampoline
        name, root = f"{owner_tag()}{next(self._counter)}", os.geteuid() == 0
        if root and self._make(name, {"memory.max": memory, "pids.max": pids, "?memory.swap.max": "0"}):
            return
        of_memory = {"memory.limit_in_bytes": memory, "?memory.memsw.limit_in_bytes": memory}
        for controller, values in {"pids": {"pids.max": pids}, "memory": of_memory}.items():
            if not root or not self._make(name, values, controller):
                note(notes, f"no {controller} cgroup could be set: limited a process, not for the whole box")

    def _make(self, name: str, values: dict[str, str], controller: str = "") -> bool:
        for parent in _cgroup_parents(controller):
            if not controller:  # v2 hands a controller down only where its parent says so
                with contextlib.suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
            folder = parent / name
            try:
                folder.mkdir()
                for file, value in values.items():
                    with contextlib.suppress(OSError) if file[0] == "?" else contextlib.nullcontext():
                        fd = os.open(folder / file.removeprefix("?"), os.O_WRONLY)  # no O_CREAT: a tmpfs takes any name
                        with open(fd, "w") as stream:
                            stream.write(value)
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            self.folders.append(folder)
            return True
        return False

    def entering(self, command: list[str]) -> list[str]:
        """`command`, started as a member: the shell joins before it becomes the command, so nothing escapes."""
        if not self.folders:
            return command
        files = [str(folder / "cgroup.procs") for folder in self.folders]
        script = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ >"$1" || exit 125; shift; n=$((n-1)); done; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", str(len(files)), *files, *command]

    def end(self) -> None:
        for folder in self.folders:
            _end_cgroup(folder)
        self.folders = []


def lacking() -> list[str]:
    """What cannot be limited for a whole box here, tried with a group: of "pids" and "memory"."""
    notes: list[str] = []
    ControlGroup(Limits(), notes).end()
    return [name for name in ("pids", "memory") if any(f"no {name} cgroup" in text for text in notes)]


def note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


def owner_tag() -> str:
    """The prefix of everything this grader may leave behind: PID namespace, pid, and when that pid started."""
    return f"shardlings-{_pid_namespace()}-{os.getpid()}-{_started(os.getpid())}-"


def sweep() -> None:
    """Remove cgroups (and their members) and temporary folders of graders that are dead."""
    for _, mount, _ in hierarchies():
        for folder, children, _ in os.walk(mount, topdown=False):
            for child in children:
                if _orphan(child):
                    _end_cgroup(Path(folder, child))
    for path in Path(tempfile.gettempdir()).glob("shardlings-*"):
        if _orphan(path.name) and path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


def _orphan(name: str) -> bool:
    """Whether `name` was made by a grader of this PID namespace that no longer runs."""
    parts = name.split("-")
    if len(parts) < 5 or parts[0] != "shardlings" or parts[1] != _pid_namespace() or not parts[2].isdecimal():
        return False
    return _started(int(parts[2])) != parts[3]


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"  # macOS


def _started(pid: int) -> str:
    """A number that tells this process from a later one with its pid; "gone" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0" if psutil.pid_exists(pid) else "gone"


def hierarchies() -> list[tuple[str, Path, list[str]]]:
    """(type, mount point, options) of each cgroup hierarchy."""
    mounts = psutil.disk_partitions(all=True)
    return [(m.fstype, Path(m.mountpoint), m.opts.split(",")) for m in mounts if m.fstype in ("cgroup", "cgroup2")]


def _cgroup_parents(controller: str) -> Iterator[Path]:
    """Where a group of ours may go, best first: below our own, so that limits set on the grader still hold.

    controller: of v1, or "" for v2, where a group with processes can have no limited children and we look upwards.
    """
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path.lstrip("/")))
    for kind, mount, options in hierarchies():
        if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options):
            here = mount / own.get(controller, "")
            yield from (p for p in (here, *here.parents) if p.is_relative_to(mount) and p.is_dir())


def _end_cgroup(folder: Path, timeout_s: float = 10.0) -> None:
    """Kill the members until there are none, then remove the folder."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            members = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not members:
                folder.rmdir()
                return
        except FileNotFoundError:
            return
        except OSError:
            pass  # still being emptied
        time.sleep(0.005)
