"""Control groups limit the memory and processes of a whole box, summed over its processes.

Names of cgroups and temporary folders, which outlive a crash, identify their grader, so that the next grader can
remove those of dead graders.
"""

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
    """The cgroups of one box. v1: one for pids and one for memory; v2: one; none if this machine does not allow any."""

    _counter = itertools.count()

    def __init__(self, limits: Limits, notes: list[str]):
        """Create the cgroups and set their limits; record in `notes` which limits could not be set."""
        self.folders: list[Path] = []
        pids, memory = str(limits.processes + 8), str(limits.memory_bytes)  # 8: bwrap, setpriv, the trampoline
        name, root = f"{owner_tag()}{next(self._counter)}", os.geteuid() == 0
        if root and self._make(name, {"memory.max": memory, "pids.max": pids, "?memory.swap.max": "0"}):
            return
        memory_values = {"memory.limit_in_bytes": memory, "?memory.memsw.limit_in_bytes": memory}
        for controller, values in {"pids": {"pids.max": pids}, "memory": memory_values}.items():
            if not root or not self._make(name, values, controller):
                notes.append(f"no {controller} cgroup could be set: the limit holds per process, not for the whole box")

    def _make(self, name: str, values: dict[str, str], controller: str = "") -> bool:
        for parent in _cgroup_parents(controller):
            if not controller:  # in v2 a parent must enable a controller for its children
                with contextlib.suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
            folder = parent / name
            try:
                folder.mkdir()
                for file, value in values.items():
                    with contextlib.suppress(OSError) if file[0] == "?" else contextlib.nullcontext():
                        fd = os.open(folder / file.removeprefix("?"), os.O_WRONLY)  # no O_CREAT: the file must exist
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
        """Return the command that runs `command` as a member: a shell joins the cgroups, then execs `command`."""
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
    """Return which of "pids" and "memory" cannot be limited for a whole box here. Creates cgroups to find out."""
    notes: list[str] = []
    ControlGroup(Limits(), notes).end()
    return [name for name in ("pids", "memory") if any(f"no {name} cgroup" in text for text in notes)]


def owner_tag() -> str:
    """Return the name prefix of everything that this grader may leave behind: its PID namespace, pid and start time."""
    return f"shardlings-{_pid_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-"


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
    return _start_time(int(parts[2])) != parts[3]


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"  # macOS


def _start_time(pid: int) -> str:
    """Return a process's start time, which differs for a later process with the same pid; "gone" if none runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0" if psutil.pid_exists(pid) else "gone"


def hierarchies() -> list[tuple[str, Path, list[str]]]:
    """Return (type, mount point, options) of each cgroup hierarchy."""
    mounts = psutil.disk_partitions(all=True)
    return [(m.fstype, Path(m.mountpoint), m.opts.split(",")) for m in mounts if m.fstype in ("cgroup", "cgroup2")]


def _cgroup_parents(controller: str) -> Iterator[Path]:
    """Yield parents to try for a new cgroup. Our own cgroup is first, so that limits on the grader still apply.

    controller: name of a v1 controller; "" for v2. In v2 a cgroup with processes cannot have limited children, so we
    also try its ancestors.
    """
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path.lstrip("/")))
    for kind, mount, options in hierarchies():
        if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options):
            current = mount / paths.get(controller, "")
            yield from (p for p in (current, *current.parents) if p.is_relative_to(mount) and p.is_dir())


def _end_cgroup(folder: Path) -> None:
    """Kill the members until none is left, then remove the folder. Gives up after 10 s."""
    deadline = time.monotonic() + 10.0
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
            pass  # members are still ending
        time.sleep(0.005)
