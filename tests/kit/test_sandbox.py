"""What runs in the sandbox finds nothing it should not, harms nothing, and ends when told.

`test_the_lookout_sees…` runs the same spies without a box: a spy that finds nothing there would prove nothing here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grader import sandbox
from grader.sandbox import Limits, Sandbox, SandboxError, available, choose, fallback

KIT = Path(__file__).resolve().parents[2]
SECRET = "the-expected-value-41.97"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit with everything an instructor has lying around; every hidden file holds SECRET."""
    root = tmp_path_factory.mktemp("kit")
    for name in ("lab/__init__.py", "tests/__init__.py", "tests/ddp/__init__.py", "tests/ddp/probes.py",
                 "tests/ddp/probes_more.py"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("WHERE = __file__\n")
    for name in HIDDEN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(SECRET)
    for student in ("alice", "bob"):
        (root / "work" / student / "ddp").mkdir(parents=True)
        (root / "work" / student / "ddp" / "naive.py").write_text(SECRET if student == "bob" else "MINE = 1\n")
    (root / "work" / "alice" / "leak.py").symlink_to(root / "gradebook.sqlite")
    return root


HIDDEN = [
    "tests/ddp/test_ddp.py", "tests/kit/__init__.py", "tests/conftest.py", "reference/ddp/naive.py",
    "grader/judge.py", "examples/expected.json", "gradebook.sqlite", "assignment.toml", ".git/config",
    "student/ddp/naive.py",
]  # fmt: skip


def in_a_box(kit: Path, code: str, isolation: str = "bubblewrap", timeout: float = 60, **limits: int):
    """What `code` prints as JSON, run as a student's would be."""
    with Sandbox(isolation, kit / "work" / "alice", kit, Limits(**limits)) as box:
        process = box.popen(["-c", "import json, os, sys\n" + code], {"GIVEN": "yes"})
        out, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, box.stderr(process)
        return json.loads(out)


@pytest.fixture
def boxed(kit: Path):
    if reason := available()["bubblewrap"]:
        pytest.skip(reason)
    return lambda code, **more: in_a_box(kit, code, **more)


SPY_FILES = """
found = []
for top in sys.argv[1:] or ["/"]:
    for folder, folders, files in os.walk(top):
        folders[:] = [f for f in folders if os.path.join(folder, f) not in ("/usr", "/proc", "/sys", PREFIX, BASE)]
        for file in files:
            try:
                if not os.path.isfile(os.path.join(folder, file)): continue
                with open(os.path.join(folder, file), "rb") as stream:
                    if SECRET.encode() in stream.read(1 << 20): found.append(os.path.join(folder, file))
            except OSError: pass
print(json.dumps(found))
"""
SPY_PROC = """
found = []
for pid in [p for p in os.listdir("/proc") if p.isdecimal() and int(p) != os.getpid()]:
    for name in ("environ", "cmdline"):
        try:
            if SECRET.encode() in open(f"/proc/{pid}/{name}", "rb").read(): found.append(f"{pid}/{name}")
        except OSError: pass
print(json.dumps(found))
"""


def spy(code: str) -> str:
    half = len(SECRET) // 2  # in two pieces, so that the spy does not find itself
    prefixes = f"PREFIX, BASE = {sys.prefix!r}, {sys.base_prefix!r}\n"
    return f"SECRET = {SECRET[:half]!r} + {SECRET[half:]!r}\n" + prefixes + code


def test_no_hidden_file_can_be_read_inside(boxed) -> None:
    assert boxed(spy(SPY_FILES)) == []


def test_gpus_are_seen_inside_and_other_devices_are_not(boxed, monkeypatch) -> None:
    """A job's choice of GPUs comes with them; for want of one, another device stands for it."""
    listed = "print(json.dumps([os.path.exists('/dev/kmsg'), os.environ.get('CUDA_VISIBLE_DEVICES')]))"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert boxed(listed) == [False, None]
    monkeypatch.setattr(sandbox.bubblewrap, "devices", lambda: [Path("/dev/kmsg")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert boxed(listed) == [True, "1"]


def test_the_lookout_sees_hidden_files_without_a_box(kit: Path) -> None:
    code = spy(SPY_FILES).replace("sys.argv[1:] or", f"[{str(kit)!r}] or")
    assert len(in_a_box(kit, code, "process")) == len(HIDDEN) + 2  # bob's, and alice's link


def test_the_kit_inside_is_lab_probes_and_the_submission(boxed) -> None:
    seen = boxed("print(json.dumps(sorted(os.path.join(d, f) for d, _, fs in os.walk('/kit') for f in fs)))")
    assert seen == ["/kit/impl/ddp/naive.py", "/kit/lab/__init__.py", "/kit/tests/__init__.py",
                    "/kit/tests/ddp/__init__.py", "/kit/tests/ddp/probes.py",
                    "/kit/tests/ddp/probes_more.py"]  # fmt: skip
    assert boxed("import lab, tests.ddp.probes as p; print(json.dumps([lab.WHERE, p.WHERE]))") == [
        "/kit/lab/__init__.py",
        "/kit/tests/ddp/probes.py",
    ]


def test_the_repository_around_a_virtual_environment_looks_empty(boxed) -> None:
    listed = boxed(f"p = {str(KIT)!r}; print(json.dumps(os.listdir(p) if os.path.exists(p) else []))")
    assert set(listed) <= {Path(sys.prefix).name}


def test_a_virtual_environment_below_tmp_is_seen(boxed, kit: Path, tmp_path: Path) -> None:
    """The scratch /tmp must not hide the interpreter of a checkout that lies there."""
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    with Sandbox("bubblewrap", kit / "work" / "alice", kit, python=str(made / "bin" / "python")) as box:
        process = box.popen(["-c", "print(6 * 7)"], {})
        assert process.stdout is not None
        assert process.stdout.read() == b"42\n", box.stderr(process)


LOOK_AROUND = """
def attempt(action, *args):
    try: return action(*args)
    except OSError: return None
status = open("/proc/self/status").read().splitlines()
print(json.dumps([
    [p for p in os.listdir("/proc") if p.isdecimal()], os.getresuid(), [l.split()[1] for l in status if l[:3] == "Cap"],
    attempt(os.listdir, HOME) or [], attempt(os.listdir, "/home"), attempt(open, "/etc/shadow") and "opened",
]))
"""


def test_homes_shadow_and_other_processes_are_out_of_reach(boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_SECRET", SECRET)
    other = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60) # {SECRET}"], env=dict(os.environ))
    try:
        assert boxed(spy(SPY_PROC)) == []
        pids, uids, caps, home, homes, shadow = boxed(f"HOME = {str(Path.home())!r}\n" + LOOK_AROUND)
        assert str(other.pid) not in pids
        assert len(pids) <= 3
        assert len(set(uids)) == 1
        assert 0 not in uids
        assert all(int(c, 16) == 0 for c in caps)
        on_the_way = {part for path in (sys.prefix, sys.base_prefix) for part in Path(path).parts}
        assert set(home) <= on_the_way, "of the home only the way to the interpreter is there"
        assert homes is None
        assert shadow is None
    finally:
        other.kill()
        other.wait()


def test_the_lookout_sees_the_parents_environment_without_a_box(kit: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"GRADER_SECRET": SECRET})
    try:
        assert f"{other.pid}/environ" in in_a_box(kit, spy(SPY_PROC), "process")
    finally:
        other.kill()
        other.wait()


def test_the_environment_holds_only_what_was_given(boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_SECRET", SECRET)
    minimum = {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"}
    environment = boxed("print(json.dumps(dict(os.environ)))")
    assert set(environment) == minimum | {"GIVEN"}
    assert SECRET not in str(environment)


# Where to try comes from outside: without a box this writes for real, and as root to anything.
WRITE = """
wrote = []
for folder in FOLDERS:
    try:
        open(os.path.join(folder, "forged"), "w").write("x")
        wrote.append(folder)
    except OSError: pass
for file in FILES:
    try:
        open(file, "r+").close()  # opened, never written
        wrote.append(file)
    except OSError: pass
print(json.dumps(wrote))
"""


def test_only_the_scratch_folders_can_be_written(boxed) -> None:
    folders = [
        "/",
        "/kit",
        "/kit/lab",
        "/kit/impl",
        "/kit/impl/ddp",
        "/usr",
        "/usr/lib",
        "/etc",
        "/dev",
        "/sys",
        "/proc",
    ]
    folders += ["/var", sys.prefix, sys.base_prefix, "/tmp", "/dev/shm"]
    files = ["/kit/lab/__init__.py", "/kit/impl/ddp/naive.py", "/etc/passwd", "/proc/sys/kernel/hostname"]
    assert boxed(f"FOLDERS, FILES = {folders!r}, {files!r}\n" + WRITE) == ["/tmp", "/dev/shm"]


def test_the_lookout_can_write_without_a_box(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tries = [str(tmp_path)], [str(tmp_path / "file")]  # nothing outside tmp_path: here every write succeeds
    assert in_a_box(kit, f"FOLDERS, FILES = {tries!r}\n" + WRITE, "process") == [*tries[0], *tries[1]]


CONNECT = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    client.sendall(b"hello"); loop = server.accept()[0].recv(5).decode()
reached = []
for family, address in TARGETS:
    try:
        socket.socket(family, socket.SOCK_STREAM).connect(address if isinstance(address, str) else tuple(address))
        reached.append(address)
    except OSError: pass
print(json.dumps([loop, [n for _, n in socket.if_nameindex()], reached]))
"""


@pytest.mark.parametrize("isolation", ["bubblewrap", "process"])
def test_the_only_network_is_its_own_loopback(kit: Path, tmp_path: Path, isolation: str) -> None:
    if reason := available()[isolation]:
        pytest.skip(reason)
    abstract = f"\0shardlings-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as host, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        targets = [[int(socket.AF_INET), host.getsockname()], [int(socket.AF_UNIX), abstract]]
        loop, names, reached = in_a_box(kit, f"TARGETS = {targets!r}\n" + CONNECT, isolation)
    assert loop == "hello"
    assert len(reached) == (0 if isolation == "bubblewrap" else 2)
    assert names == ["lo"] or isolation == "process"


VSOCK = """
import socket
try: socket.socket(40, socket.SOCK_STREAM)
except OSError as error: print(error.errno)
"""


def test_no_sockets_past_the_network(boxed) -> None:
    assert boxed(VSOCK) == 97  # EAFNOSUPPORT


def test_gloo_works_inside(boxed) -> None:
    rank = (
        "def rank(r):\n"
        "  import torch, torch.distributed as d\n"
        "  d.init_process_group('gloo', init_method='file:///tmp/store', rank=r, world_size=2)\n"
        "  x = torch.ones(4) * (r + 1); d.all_reduce(x); return x.tolist()\n"
    )
    assert (
        boxed(
            rank + "import torch.distributed\npid = os.fork()\nx = rank(1 if pid else 0)\n"
            "if not pid: os._exit(0)\nos.waitpid(pid, 0); print(json.dumps(x)); sys.stdout.flush(); os._exit(0)"
        )
        == [3.0] * 4
    )


def test_inherited_descriptors_are_invisible(boxed, tmp_path: Path) -> None:
    (tmp_path / "open").write_text(SECRET)
    fd = os.open(tmp_path / "open", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert boxed("print(json.dumps(sorted(f for f in os.listdir('/proc/self/fd') if int(f) > 3)))") == []
    finally:
        os.close(fd)


BOMB = """
import time
count = 0
try:
    while count < 3000:
        if os.fork() == 0: time.sleep(100)
        count += 1
except OSError: pass
print(json.dumps(count)); sys.stdout.flush(); time.sleep(100)
"""
DAEMON = """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(100)
    os._exit(0)
time.sleep(.2); print(7); sys.stdout.flush(); time.sleep(100)
"""


def members(marker: str) -> list[int]:
    """Pids of this machine with `marker` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize("wrapped", ["fork bomb", "setsid"])
def test_kill_ends_everything(kit: Path, wrapped: str) -> None:
    if reason := available()["bubblewrap"]:
        pytest.skip(reason)
    marker = f"marker-{time.monotonic_ns()}"
    with Sandbox("bubblewrap", kit / "work" / "alice", kit, Limits(processes=100)) as box:
        process = box.popen(["-c", "import json, os, sys\n" + (BOMB if wrapped == "fork bomb" else DAEMON), marker], {})
        assert process.stdout is not None
        count = json.loads(process.stdout.readline())
        assert count == 7 if wrapped == "setsid" else 80 <= count <= 100
        assert len(members(marker)) >= (count if wrapped == "fork bomb" else 2)
        began = time.monotonic()
        box.kill(process)
        assert members(marker) == []
        assert time.monotonic() - began < 5
        assert leftovers() == []


def leftovers(grader: int | None = None) -> list[str]:
    """Control groups that a grader (this process, by default) has not removed; others may be grading beside us."""
    pattern = f"**/shardlings-*-{grader or os.getpid()}-*"
    return [str(p) for p in Path("/sys/fs/cgroup").glob(pattern)] if os.path.isdir("/sys/fs/cgroup") else []


def test_an_enormous_allocation_fails_inside_only(boxed) -> None:
    assert (
        boxed("try: x = bytearray(10 << 30); print(json.dumps('got it'))\nexcept MemoryError: print(json.dumps('no'))")
        == "no"
    )


def test_the_memory_of_all_processes_together_is_bounded(kit: Path) -> None:
    if reason := available()["bubblewrap"]:
        pytest.skip(reason)
    code = (
        "pids = []\nfor _ in range(4):\n  pids.append(os.fork())\n"
        "  if not pids[-1]:\n    x = bytearray(b'x') * (150 << 20); import time; time.sleep(1); os._exit(0)\n"
        "print(json.dumps([os.waitpid(p, 0)[1] for p in pids]))"
    )
    with Sandbox("bubblewrap", kit / "work" / "alice", kit, Limits(memory_bytes=300 << 20)) as box:
        process = box.popen(["-c", "import json, os\n" + code], {})
        out, _ = process.communicate(timeout=60)
        if any("memory" in n for n in box.notes):
            assert os.geteuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK)
            pytest.skip(f"no memory cgroup can be written here: {box.notes}")
        assert signal.SIGKILL in json.loads(out), "600 MiB fitted into 300"


def test_a_disk_bomb_meets_the_bound_of_its_tmpfs(boxed) -> None:
    fill = (
        "def fill(folder):\n  total = 0\n  try:\n    for i in range(99):\n"
        "      with open(f'{folder}/{i}', 'wb', 0) as f: total += f.write(bytes(8 << 20))\n"
        "  except OSError: pass\n  return total >> 20\n"
        "print(json.dumps([fill('/tmp'), fill('/dev/shm')]))"
    )
    assert max(boxed(fill, tmp_bytes=32 << 20)) <= 32


def test_one_file_and_the_open_files_are_bounded(boxed) -> None:
    names = ["RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CPU", "RLIMIT_CORE"]
    got = boxed(f"import resource\nprint(json.dumps([resource.getrlimit(getattr(resource, n)) for n in {names}]))")
    mine = Limits()
    want = [mine.process_bytes, mine.processes, mine.file_bytes, mine.open_files, mine.cpu_s, 0]
    assert got == [[w, w] for w in want] or os.geteuid() != 0


def test_boxes_at_the_same_time_have_different_users(kit: Path) -> None:
    if available()["bubblewrap"] or os.geteuid() != 0:
        pytest.skip(available()["bubblewrap"] or "only root changes users")
    with Sandbox("bubblewrap", kit / "work" / "alice", kit) as box:
        code = "import os, time; print(os.getuid(), flush=True); time.sleep(60)"
        both = [box.popen(["-c", code], {}) for _ in range(2)]
        uids = {int(p.stdout.readline()) for p in both if p.stdout}
        assert len(uids) == 2
        assert min(uids) >= 50_000


def test_a_grader_that_is_killed_leaves_nothing(kit: Path) -> None:
    if reason := available()["bubblewrap"]:
        pytest.skip(reason)
    marker = f"marker-{time.monotonic_ns()}"
    code = f"""
import sys, time
from pathlib import Path
from grader.sandbox import Sandbox
box = Sandbox("bubblewrap", Path({str(kit)!r}) / "work/alice", Path({str(kit)!r}))
process = box.popen(["-c", "import os, time; os.fork(); print(1, flush=True); time.sleep(100)", {marker!r}], {{}})
process.stdout.readline(); print(box._root, flush=True); time.sleep(100)
"""
    grader = subprocess.Popen([sys.executable, "-c", code], cwd=KIT, stdout=subprocess.PIPE, text=True)
    assert grader.stdout is not None
    root = Path(grader.stdout.readline().strip())
    assert len(members(marker)) >= 2
    assert root.is_dir()
    grader.kill()
    grader.wait()
    deadline = time.monotonic() + 5
    while members(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert members(marker) == []
    with Sandbox("bubblewrap", kit / "work" / "alice", kit):  # sweeps
        assert leftovers(grader.pid) == []
        assert not root.exists()


def test_standard_error_is_kept_and_bounded(kit: Path) -> None:
    with Sandbox("process", kit / "work" / "alice", kit) as box:
        process = box.popen(["-c", "import sys; sys.stderr.write('x' * 300_000 + 'the end')"], {})
        process.wait(timeout=30)
        assert box.stderr(process).endswith("the end")
        assert len(box.stderr(process)) == 1 << 16


@pytest.mark.parametrize("isolation", ["uid", "process"])
def test_the_weaker_boxes_run_and_end(kit: Path, isolation: str) -> None:
    python = sys.executable
    if isolation == "uid" and (reason := fallback.why_not_uid(python)):
        python = "/usr/bin/python3"  # an interpreter under a private home is out of an unprivileged user's reach
        if fallback.why_not_uid(python):
            pytest.skip(reason)
    marker = f"marker-{time.monotonic_ns()}"
    code = "import lab, os, time; os.fork(); print(os.getuid(), os.getcwd(), flush=True); time.sleep(100)"
    with Sandbox(isolation, kit / "work" / "alice", kit, python=python) as box:
        process = box.popen(["-c", code, marker], {})
        assert process.stdout is not None
        uid, folder = process.stdout.readline().decode().split() or pytest.fail(box.stderr(process))
        assert (int(uid) != os.getuid()) == (isolation == "uid")
        assert sorted(p.name for p in Path(box.kit_path).iterdir()) == ["impl", "lab", "tests"]
        box.kill(process)
        give_up = time.monotonic() + 5  # who was killed may take a moment to be gone, on busy cores
        while members(marker) and time.monotonic() < give_up:
            time.sleep(0.02)
        assert members(marker) == []
        assert not Path(folder).exists()


def test_uid_isolation_ends_daemons_and_keeps_other_boxes_out(kit: Path) -> None:
    python = next((p for p in (sys.executable, "/usr/bin/python3") if not fallback.why_not_uid(p)), "")
    if not python:
        pytest.skip(fallback.why_not_uid(sys.executable))
    marker = f"marker-{time.monotonic_ns()}"
    with Sandbox("uid", kit / "work" / "bob", kit, python=python) as bob:
        with Sandbox("uid", kit / "work" / "alice", kit, python=python) as alice:
            theirs = bob.submission_path + "/ddp/naive.py"
            spies = f"try: print(open({theirs!r}).read())\nexcept OSError as e: print(e.errno)"
            looking = alice.popen(["-c", spies], {})
            assert looking.communicate(timeout=30)[0] == b"13\n"
        process = bob.popen(["-c", "import json, os, sys\n" + DAEMON, marker], {})
        assert process.stdout is not None
        assert process.stdout.readline() == b"7\n"
        assert len(members(marker)) >= 2
        bob.kill(process)
        assert members(marker) == []
        assert leftovers() == []


def test_it_fails_closed(monkeypatch: pytest.MonkeyPatch, kit: Path) -> None:
    monkeypatch.setattr(sandbox, "_available", lambda: {"bubblewrap": "not installed", "uid": "no", "process": ""})
    for wanted in (None, "bubblewrap", "uid", "nonsense"):
        with pytest.raises(SandboxError, match="expected an isolation" if wanted == "nonsense" else "isolation: no"):
            choose(wanted)
    assert choose("process") == "process"
    with pytest.raises(SandboxError, match="expected a folder"):
        Sandbox("process", kit / "nobody", kit)
