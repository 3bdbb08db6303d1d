"""The weak boxes, for machines where bubblewrap cannot run. The caller must name one explicitly.

`uid` (needs root): a separate unprivileged user id, resource limits, and a cgroup if one can be created. It does NOT
hide files that any user of this machine may read, nor the process list, and it leaves the network open. So keep the
kit, the reference and other submissions in a folder of mode 0700. /tmp is shared with the machine: only the size of
each file is limited, not the sum.

`process`: a child process with the resource limits that the system supports. It hides nothing, and a daemon started
inside survives. Use it only for code that you trust.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grader.sandbox.bubblewrap import unprivileged
from grader.sandbox.cgroups import ControlGroup
from grader.sandbox.limits import Identity, Limits, SandboxError, limited


def why_not_uid(python: str) -> str:
    """ "" if a child can run `python` as an unprivileged user; else the reason and a command that helps."""
    if sys.platform != "linux":
        return f"uid isolation needs Linux, this is {sys.platform}; pass --isolation process for honest code"
    if os.geteuid() != 0:
        return "uid isolation needs root; run with: sudo"
    if shutil.which("setpriv") is None:
        return "setpriv is not installed; run: apt-get install util-linux"
    try:
        identity = Identity()
        command = [*unprivileged(identity.uid, identity.uid), *limited(Limits(), python, ["-c", "import json"], True)]
        trial = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        identity.release()
    except (OSError, subprocess.TimeoutExpired, SandboxError) as error:
        return f"no process could be started as another user ({error}); pass --isolation process for honest code"
    if trial.returncode != 0:
        reason = (trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"])[-1]
        return f"{python} cannot be run by an unprivileged user ({reason}); run: python3 -m venv in a public folder"
    return ""


class Box:
    """One running Python under `uid` or `process` isolation, with its own scratch folder."""

    def __init__(
        self, staged: Path, user: bool, limits: Limits, python: str, args: list[str], env: dict[str, str],
        stdin: int, stderr: int, notes: list[str],
    ):  # fmt: skip
        self.identity = Identity() if user else None
        self.group = ControlGroup(limits, notes) if user else None
        self.scratch = Path(tempfile.mkdtemp(dir=staged.parent))
        command = limited(limits, python, args, strict=user)
        if self.identity and self.group:
            os.chown(self.scratch, self.identity.uid, staged.parent.stat().st_gid)
            command = self.group.entering(unprivileged(self.identity.uid, staged.parent.stat().st_gid) + command)
        env = {name: str(self.scratch) if value == "/tmp" else value for name, value in env.items()}
        self.process = subprocess.Popen(
            command, env=env, cwd=self.scratch, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        self.started = True

    def end(self) -> None:
        """Kill the process group, and under `uid` every process of the user. Remove the scratch folder."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        if self.identity:
            _kill_all_of(self.identity)
            self.identity.release()
        if self.group:
            self.group.end()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _kill_all_of(identity: Identity) -> None:
    """Run kill(-1) as that user. It kills all processes of the user at once, so a fork bomb cannot outrun it."""
    deadline = time.monotonic() + 10.0
    while identity.processes():
        if time.monotonic() > deadline:
            raise SandboxError(f"expected all processes of user {identity.uid} to end, some did not; look at: ps -ef")
        subprocess.run([*unprivileged(identity.uid, identity.uid), "/bin/sh", "-c", "kill -KILL -1"], check=False)
        time.sleep(0.01)
