"""Code in the sandbox stays within its limits, and ends when it is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grader.sandbox import Limits, available, fallback

from .boxes import KIT, box, started

BOMB = """
count = 0
try:
    while count < 3000:
        if os.fork() == 0: time.sleep(100)
        count += 1
except OSError: pass
print(json.dumps(count)); sys.stdout.flush(); time.sleep(100)
"""


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(100)
    os._exit(0)
time.sleep(.2); print(7); sys.stdout.flush(); time.sleep(100)
"""


def members(marker: str) -> list[int]:
    """Pids of this machine's processes with `marker` in their command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or [])]


def ended(marker: str, within_s: float = 5.0) -> bool:
    """Whether all these processes end in time. On busy cores a killed process takes a moment to end."""
    deadline = time.monotonic() + within_s
    while members(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not members(marker)


@pytest.mark.parametrize("wrapped", ["fork bomb", "setsid"])
def test_kill_ends_descendants_and_removes_control_groups(kit: Path, wrapped: str) -> None:
    marker, bomb = f"marker-{time.monotonic_ns()}", wrapped == "fork bomb"
    with box(kit, processes=100) as sandbox:
        process, line = started(sandbox, BOMB if bomb else DAEMON, marker)
        count = int(line)
        assert 80 <= count <= 100 if bomb else count == 7
        assert len(members(marker)) >= (count if bomb else 2)
        sandbox.kill(process)
        assert members(marker) == []
        assert leftovers() == []


def leftovers(grader: int | None = None) -> list[str]:
    """Control groups that a grader (default: this process) has not removed. Other graders may run at the same time."""
    pattern = f"**/shardlings-*-{grader or os.getpid()}-*"
    return [str(p) for p in Path("/sys/fs/cgroup").glob(pattern)] if os.path.isdir("/sys/fs/cgroup") else []


def test_an_enormous_allocation_fails_inside_only(boxed) -> None:
    code = "try: x = bytearray(10 << 30); print('\"got it\"')\nexcept MemoryError: print('\"no\"')"
    assert boxed(code) == "no"


TOGETHER = """
pids = []
for _ in range(4):
    pids.append(os.fork())
    if not pids[-1]:
        x = bytearray(b'x') * (150 << 20); time.sleep(1); os._exit(0)
print(json.dumps([os.waitpid(p, 0)[1] for p in pids]))
"""


def test_the_memory_of_all_processes_together_is_bounded(kit: Path) -> None:
    with box(kit, memory_bytes=300 << 20) as sandbox:
        _, line = started(sandbox, TOGETHER)
        if any("memory" in n for n in sandbox.notes):
            assert os.geteuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK)
            pytest.skip(f"no memory cgroup can be written here: {sandbox.notes}")
        assert signal.SIGKILL in json.loads(line), "600 MiB fitted into 300"


FILL = """
def fill(folder):
    total = 0
    try:
        for i in range(99):
            with open(f'{folder}/{i}', 'wb', 0) as f: total += f.write(bytes(8 << 20))
    except OSError: pass
    return total >> 20
print(json.dumps([fill('/tmp'), fill('/dev/shm')]))
"""


def test_a_disk_bomb_meets_the_bound_of_its_tmpfs(boxed) -> None:
    assert max(boxed(FILL, tmp_bytes=32 << 20)) <= 32


def test_sandboxed_processes_get_the_configured_rlimits(boxed) -> None:
    names = ["RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CPU", "RLIMIT_CORE"]
    got = boxed(f"import resource\nprint(json.dumps([resource.getrlimit(getattr(resource, n)) for n in {names}]))")
    limits = Limits()
    want = [limits.process_bytes, limits.processes, limits.file_bytes, limits.open_files, limits.cpu_s, 0]
    assert got == [[w, w] for w in want] or os.geteuid() != 0


def test_boxes_at_the_same_time_have_different_users(kit: Path) -> None:
    with box(kit) as sandbox:
        if os.geteuid() != 0:
            pytest.skip("only root changes users")
        uids = {int(started(sandbox, "print(os.getuid(), flush=True); time.sleep(60)")[1]) for _ in range(2)}
        assert len(uids) == 2
        assert min(uids) >= 50_000


def test_killed_grader_leaves_no_processes_groups_or_folders(kit: Path) -> None:
    if reason := available()["bubblewrap"]:
        pytest.skip(reason)
    marker = f"marker-{time.monotonic_ns()}"
    code = f"""
import sys, time
from pathlib import Path
from grader.sandbox import Sandbox
box = Sandbox("bubblewrap", Path({str(kit)!r}) / "work/alice", Path({str(kit)!r}))
process = box.open(["-c", "import os, time; os.fork(); print(1, flush=True); time.sleep(100)", {marker!r}], {{}})
process.stdout.readline(); print(box._root, flush=True); time.sleep(100)
"""
    grader = subprocess.Popen([sys.executable, "-c", code], cwd=KIT, stdout=subprocess.PIPE, text=True)
    assert grader.stdout is not None
    root = Path(grader.stdout.readline().strip())
    assert len(members(marker)) >= 2
    assert root.is_dir()
    grader.kill()
    grader.wait()
    assert ended(marker)
    with box(kit):  # removes old groups
        assert leftovers(grader.pid) == []
        assert not root.exists()


def python_for_uid() -> str:
    """An interpreter that an unprivileged user can run; one in a private home folder cannot be used."""
    for python in (sys.executable, "/usr/bin/python3"):
        if not fallback.why_not_uid(python):
            return python
    return pytest.skip(fallback.why_not_uid(sys.executable))


@pytest.mark.parametrize("isolation", ["uid", "process"])
def test_uid_and_process_isolation_run_and_clean_up(kit: Path, isolation: str) -> None:
    python = python_for_uid() if isolation == "uid" else sys.executable
    marker = f"marker-{time.monotonic_ns()}"
    code = "import lab; os.fork(); print(os.getuid(), os.getcwd(), flush=True); time.sleep(100)"
    with box(kit, isolation, python=python) as sandbox:
        process, line = started(sandbox, code, marker)
        uid, folder = line.split()
        assert (int(uid) != os.getuid()) == (isolation == "uid")
        assert sorted(p.name for p in Path(sandbox.kit_path).iterdir()) == ["impl", "lab", "tests"]
        sandbox.kill(process)
        assert ended(marker)
        assert not Path(folder).exists()


def test_uid_isolation_ends_daemons_and_keeps_other_boxes_out(kit: Path) -> None:
    python, marker = python_for_uid(), f"marker-{time.monotonic_ns()}"
    with box(kit, "uid", "bob", python) as bob:
        with box(kit, "uid", "alice", python) as alice:
            path = bob.impl + "/ddp/naive.py"
            assert (
                started(alice, f"try: print(open({path!r}).read())\nexcept OSError as e: print(e.errno)")[1] == "13\n"
            )
        process, line = started(bob, DAEMON, marker)
        assert line == "7\n"
        assert len(members(marker)) >= 2
        bob.kill(process)
        assert members(marker) == []
        assert leftovers() == []
