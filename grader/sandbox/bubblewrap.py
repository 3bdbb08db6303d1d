"""The strong box: bubblewrap's namespaces, a read-only view of the system, a system-call filter, a separate user id.

If the grader is root, bubblewrap mounts as root, so that it can reach an interpreter in a private home, and then drops
to an unprivileged user. If the grader is a normal user, it needs user namespaces.
"""

import contextlib
import functools
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from grader.sandbox.cgroups import ControlGroup
from grader.sandbox.limits import Identity, Limits, SandboxError, limited
from lab.ranks import seccomp

KIT = "/kit"  # folder of lab/ and tests/ inside the box
SUBMISSION = "/kit/impl"

_INSTALL = "apt-get install bubblewrap"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_EXTRA_PATHS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
         "/sys/devices/system/cpu", "/sys/devices/system/node")  # fmt: skip
_PASSED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")  # the GPUs that the scheduler gave to this job
_KIT_PACKAGES = ("grader", "reference", "student", "tests", "examples")  # an installed kit's packages, hidden
_NAMESPACES = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
               "--die-with-parent", "--new-session", "--hostname", "shardlings"]  # fmt: skip


def why_not() -> str:
    """ "" if bubblewrap works here; else the reason and a command that helps. Starts a box to find out."""
    if sys.platform != "linux":
        return f"bubblewrap needs Linux, this is {sys.platform}; grade in a Linux machine or virtual machine"
    if shutil.which("bwrap") is None:
        return f"bubblewrap is not installed; run: {_INSTALL}"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "setpriv is not installed; run: apt-get install util-linux"
    command = ["bwrap", *_NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "true"]
    try:
        trial = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start ({error}); run: {_INSTALL}"
    if trial.returncode == 0:
        return ""
    reason = (trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"])[-1]
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or os.geteuid() == 0:
        return f"bubblewrap may not make namespaces here ({reason}); start the container with: docker run --privileged"
    return (
        f"bubblewrap may not make user namespaces here ({reason}); run: "
        "sudo sysctl --ignore kernel.apparmor_restrict_unprivileged_userns=0 kernel.unprivileged_userns_clone=1 "
        "user.max_user_namespaces=15000"
    )


class Box:
    """One running bubblewrap. `process` is bwrap itself; its pipes are those of the Python process inside."""

    def __init__(
        self, staged: Path, hidden: list[Path], limits: Limits, python: str, args: list[str], env: dict[str, str],
        stdin: int, stderr: int, notes: list[str],
    ):  # fmt: skip
        self.identity = Identity() if os.geteuid() == 0 else None
        if self.identity is None:  # older kernels count all processes of this user, including ours
            infos = [p.info for p in psutil.process_iter(["uids", "num_threads"]) if p.info["uids"]]
            tasks = sum(i["num_threads"] or 0 for i in infos if i["uids"].real == os.getuid())
            limits = replace(limits, processes=limits.processes + tasks)
        self.group = ControlGroup(limits, notes)
        user = self.identity.uid if self.identity else os.getuid()
        env = {k: v for k, v in os.environ.items() if k in _PASSED} | env
        options = [*_NAMESPACES, *_view(staged, hidden, limits, python)]
        fds = []
        for name, content in (
            ("passwd", f"student:x:{user}:{user}::/tmp:/bin/sh\n"),
            ("group", f"student:x:{user}:\n"),
            ("hosts", "127.0.0.1 localhost shardlings\n"),
            ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
        ):
            fds.append(_file(content))
            options += ["--perms", "0644", "--ro-bind-data", str(fds[-1]), f"/etc/{name}"]
        if filter := seccomp.program():
            fds.append(_file(filter))
            options += ["--seccomp", str(fds[-1])]
        else:
            notes.append(f"no system-call filter for {platform.machine()}: nested namespaces are not refused")
        info_read, info_write = os.pipe()
        options += ["--info-fd", str(info_write), "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        # Pass options through a descriptor, because processes inside can read the command line in /proc/1/cmdline.
        fds += [info_write, _file("\0".join(options) + "\0")]
        command = [str(shutil.which("bwrap")), "--args", str(fds[-1]), "--"]
        if self.identity:
            command += unprivileged(user, user)
        command += limited(limits, python, args, strict=True)
        try:
            self.process = subprocess.Popen(
                self.group.entering(command), env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr,
                pass_fds=fds, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(info_read)
            self.group.end()
            if self.identity:
                self.identity.release()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        with open(info_read, "rb") as stream:
            answer = stream.read()
        self.init, self.pid = -1, 0  # these stay if bwrap did not start or has ended
        with contextlib.suppress(ValueError, KeyError, OSError):
            self.pid = json.loads(answer)["child-pid"]
            self.init = os.pidfd_open(self.pid)

    @property
    def started(self) -> bool:
        return self.init >= 0

    def end(self) -> None:
        """Kill the box's first process, which ends its whole PID namespace; wait until it is gone."""
        if self.init >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.group.end()
        if self.init >= 0:
            if not select.select([self.init], [], [], 10)[0]:
                raise SandboxError("expected the sandbox to end within 10 s of SIGKILL, it did not; look at: ps -ef")
            os.close(self.init)
            self.init = -1
        if self.identity:
            self.identity.release()


def unprivileged(uid: int, gid: int) -> list[str]:
    """Return the command prefix that gives up all privileges of root."""
    return ["setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups", "--no-new-privs", "--inh-caps=-all",
            "--ambient-caps=-all", "--bounding-set=-all", "--"]  # fmt: skip


@functools.cache
def interpreter(python: str) -> tuple[tuple[Path, ...], tuple[Path, ...], tuple[Path, ...]]:
    """Return (prefixes, site-packages, symbolic links to the executable), which an interpreter needs to run."""
    code = "import json,sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.path]))"
    try:
        output = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, timeout=60, check=True)
        prefix, base, search = json.loads(output.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(f"expected {python} to be a Python, it does not run: {error}") from None
    roots = {Path(prefix), Path(base), Path(prefix).resolve(), Path(base).resolve()}
    packages = tuple(Path(p) for p in search if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir())
    for root in roots:
        if root in (Path("/"), Path.home()):
            what = f"expected {python} in a folder of its own, its prefix is {root}"
            raise SandboxError(f"{what}; use a virtual environment")
    links = []
    link = Path(python).absolute()
    while link.is_symlink():
        links.append(link)
        link = Path(os.path.normpath(link.parent / link.readlink()))
    return tuple(sorted(roots)), packages, tuple(links)


def _view(staged: Path, hidden: list[Path], limits: Limits, python: str) -> list[str]:
    """Return bwrap's mount options, parents first. `hidden` folders inside a visible folder become empty folders."""
    roots, packages, links = interpreter(python)
    scratch = ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs"]
    mounts: dict[Path, list[str]] = {
        Path(KIT): ["--ro-bind", str(staged), KIT],
        Path("/tmp"): [*scratch, "/tmp"],  # mounted before its contents: the kit's environment may lie in /tmp
    }
    system = [Path(p) for p in _SYSTEM if Path(p).is_dir()]
    for path in system:
        option = ["--symlink", os.readlink(path)] if path.is_symlink() else ["--ro-bind", str(path)]
        mounts[path] = [*option, str(path)]
    other_packages = [p for p in packages if not any(p.is_relative_to(root) for root in (*system, *roots))]
    for path in (*roots, *other_packages, *(Path(p) for p in _EXTRA_PATHS if Path(p).exists())):
        mounts.setdefault(path, ["--ro-bind", str(path), str(path)])
    seen = [Path(p) for p in mounts]
    masks = [p for p in (*hidden, *(d / name for d in packages for name in _KIT_PACKAGES)) if p.is_dir()]
    masks = [p for p in masks if any(root in p.parents for root in seen)]
    for mask in masks:
        mounts.setdefault(mask, ["--perms", "0755", "--size", "65536", "--tmpfs", str(mask)])
    for link in links:
        covered = [p for p in link.parents if p in mounts]
        if not covered or covered[0] in masks:
            mounts[link] = ["--symlink", os.readlink(link), str(link)]
    options = []
    created: set[Path] = {Path("/")}
    for path in sorted(mounts, key=lambda p: p.parts):
        for parent in reversed(path.parents):  # bwrap itself would create them with mode 0700
            if parent not in created and not any(p in system or p in roots for p in (parent, *parent.parents)):
                options += ["--perms", "0755", "--dir", str(parent)]
            created.add(parent)
        options += mounts[path]
        created.add(path)
    for path in masks:
        options += ["--remount-ro", str(path)]
    gpus = [part for device in devices() for part in ("--dev-bind", str(device), str(device))]
    return [*options, "--proc", "/proc", "--dev", "/dev", *gpus, *scratch, "/dev/shm"]


def devices() -> list[Path]:
    """Return the device files of this machine's GPUs. The variables in _PASSED choose the GPUs that a job may use."""
    return sorted(Path("/dev").glob("nvidia*"))


def _file(content: str | bytes) -> int:
    """Return a descriptor of anonymous memory from which bwrap can read `content`, so that no file remains."""
    fd = os.memfd_create("shardlings")
    os.write(fd, content.encode() if isinstance(content, str) else content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
