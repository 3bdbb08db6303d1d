"""What runs in the sandbox finds nothing it should not, harms nothing, and ends when told.

Spies run without a box, too: one that finds nothing there would prove nothing here.
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

import psutil
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


BOTH = pytest.mark.parametrize("isolation", ["bubblewrap", "process"])


def box(kit: Path, isolation: str = "bubblewrap", student: str = "alice", python: str = sys.executable, **limits: int):
    if isolation != "uid" and (reason := available()[isolation]):
        pytest.skip(reason)
    return Sandbox(isolation, kit / "work" / student, kit, Limits(**limits), python=python)


def started(box: Sandbox, code: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process in the box, and the first line that it printed."""
    process = box.popen(["-c", "import json, os, sys, time\n" + code, *arguments], {})
    assert process.stdout is not None
    return process, process.stdout.readline().decode() or pytest.fail(box.stderr(process))


def in_a_box(kit: Path, code: str, isolation: str = "bubblewrap", **limits: int):
    """What `code` prints as JSON, run as a student's would be."""
    with box(kit, isolation, **limits) as opened:
        process = opened.popen(["-c", "import json, os, sys, time\n" + code], {"GIVEN": "yes"})
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, opened.stderr(process)
        return json.loads(out)


@pytest.fixture
def boxed(kit: Path):
    return lambda code, **more: in_a_box(kit, code, **more)


SPY_FILES = """
found = []
for folder, folders, files in os.walk(TOP):
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


def spy(code: str, top: object = "/") -> str:
    half = len(SECRET) // 2  # in two pieces, so that the spy does not find itself
    prefixes = f"TOP, PREFIX, BASE = {str(top)!r}, {sys.prefix!r}, {sys.base_prefix!r}\n"
    return f"SECRET = {SECRET[:half]!r} + {SECRET[half:]!r}\n" + prefixes + code


@BOTH
def test_no_hidden_file_can_be_read_inside(kit: Path, isolation: str) -> None:
    """Without a box, of the kit alone: all of them, bob's, and alice's link."""
    top, count = ("/", 0) if isolation == "bubblewrap" else (kit, len(HIDDEN) + 2)
    assert len(in_a_box(kit, spy(SPY_FILES, top), isolation)) == count


def test_gpus_are_seen_inside_and_other_devices_are_not(boxed, monkeypatch) -> None:
    """A job's choice of GPUs comes with them; for want of one, another device stands for it."""
    listed = "print(json.dumps([os.path.exists('/dev/kmsg'), os.environ.get('CUDA_VISIBLE_DEVICES')]))"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert boxed(listed) == [False, None]
    monkeypatch.setattr(sandbox.bubblewrap, "devices", lambda: [Path("/dev/kmsg")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert boxed(listed) == [True, "1"]


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


def test_a_virtual_environment_below_tmp_is_seen(kit: Path, tmp_path: Path) -> None:
    """The scratch /tmp must not hide the interpreter of a checkout that lies there."""
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    with box(kit, python=str(made / "bin" / "python")) as opened:
        assert started(opened, "print(6 * 7)")[1] == "42\n"


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


@BOTH
def test_homes_shadow_and_other_processes_are_out_of_reach(kit: Path, isolation: str) -> None:
    command = [sys.executable, "-c", f"import time; time.sleep(60) # {SECRET}"]
    other = subprocess.Popen(command, env={**os.environ, "GRADER_SECRET": SECRET})
    try:
        found = in_a_box(kit, spy(SPY_PROC), isolation)
        if isolation == "process":
            assert {f"{other.pid}/environ", f"{other.pid}/cmdline"} <= {*found}
            return
        assert found == []
        pids, uids, caps, home, homes, shadow = in_a_box(kit, f"HOME = {str(Path.home())!r}\n" + LOOK_AROUND)
    finally:
        other.kill()
        other.wait()
    assert str(other.pid) not in pids
    assert len(pids) <= 3
    assert len(set(uids)) == 1
    assert 0 not in uids
    assert all(int(c, 16) == 0 for c in caps)
    on_the_way = {part for path in (sys.prefix, sys.base_prefix) for part in Path(path).parts}
    assert set(home) <= on_the_way, "of the home only the way to the interpreter is there"
    assert (homes, shadow) == (None, None)


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


@BOTH
def test_only_the_scratch_folders_can_be_written(kit: Path, tmp_path: Path, isolation: str) -> None:
    wrote = folders = [str(tmp_path)]  # without a box nothing outside: here every write succeeds
    files = [str(tmp_path / "forged")]
    if isolation == "bubblewrap":
        wrote = ["/tmp", "/dev/shm"]
        folders = ["/", "/kit", "/kit/lab", "/kit/impl", "/kit/impl/ddp", "/usr", "/usr/lib", "/etc", "/dev", "/sys",
                   "/proc", "/var", sys.prefix, sys.base_prefix, *wrote]  # fmt: skip
        files = ["/kit/lab/__init__.py", "/kit/impl/ddp/naive.py", "/etc/passwd", "/proc/sys/kernel/hostname"]
    got = in_a_box(kit, f"FOLDERS, FILES = {folders!r}, {files!r}\n" + WRITE, isolation)
    assert got == (wrote if isolation == "bubblewrap" else wrote + files)


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


@BOTH
def test_the_only_network_is_its_own_loopback(kit: Path, tmp_path: Path, isolation: str) -> None:
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


GLOO = """
def rank(r):
    import torch, torch.distributed as d
    d.init_process_group('gloo', init_method='file:///tmp/store', rank=r, world_size=2)
    x = torch.ones(4) * (r + 1); d.all_reduce(x); return x.tolist()
import torch.distributed
pid = os.fork()
x = rank(1 if pid else 0)
if not pid: os._exit(0)
os.waitpid(pid, 0); print(json.dumps(x)); sys.stdout.flush(); os._exit(0)
"""


def test_gloo_works_inside(boxed) -> None:
    assert boxed(GLOO) == [3.0] * 4


def test_inherited_descriptors_are_invisible(boxed, tmp_path: Path) -> None:
    (tmp_path / "open").write_text(SECRET)
    fd = os.open(tmp_path / "open", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert boxed("print(json.dumps(sorted(f for f in os.listdir('/proc/self/fd') if int(f) > 3)))") == []
    finally:
        os.close(fd)


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
    """Pids of this machine with `marker` in their command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or [])]


def gone(marker: str, within_s: float = 5.0) -> bool:
    """Who was killed may take a moment to be gone, on busy cores."""
    deadline = time.monotonic() + within_s
    while members(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not members(marker)


@pytest.mark.parametrize("wrapped", ["fork bomb", "setsid"])
def test_kill_ends_everything(kit: Path, wrapped: str) -> None:
    marker, bomb = f"marker-{time.monotonic_ns()}", wrapped == "fork bomb"
    with box(kit, processes=100) as opened:
        process, said = started(opened, BOMB if bomb else DAEMON, marker)
        count = int(said)
        assert 80 <= count <= 100 if bomb else count == 7
        assert len(members(marker)) >= (count if bomb else 2)
        opened.kill(process)
        assert members(marker) == []
        assert leftovers() == []


def leftovers(grader: int | None = None) -> list[str]:
    """Control groups that a grader (this process, by default) has not removed; others may be grading beside us."""
    pattern = f"**/shardlings-*-{grader or os.getpid()}-*"
    return [str(p) for p in Path("/sys/fs/cgroup").glob(pattern)] if os.path.isdir("/sys/fs/cgroup") else []


def test_an_enormous_allocation_fails_inside_only(boxed) -> None:
    take = "try: x = bytearray(10 << 30); print('\"got it\"')\nexcept MemoryError: print('\"no\"')"
    assert boxed(take) == "no"


TOGETHER = """
pids = []
for _ in range(4):
    pids.append(os.fork())
    if not pids[-1]:
        x = bytearray(b'x') * (150 << 20); time.sleep(1); os._exit(0)
print(json.dumps([os.waitpid(p, 0)[1] for p in pids]))
"""


def test_the_memory_of_all_processes_together_is_bounded(kit: Path) -> None:
    with box(kit, memory_bytes=300 << 20) as opened:
        _, said = started(opened, TOGETHER)
        if any("memory" in n for n in opened.notes):
            assert os.geteuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK)
            pytest.skip(f"no memory cgroup can be written here: {opened.notes}")
        assert signal.SIGKILL in json.loads(said), "600 MiB fitted into 300"


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


def test_one_file_and_the_open_files_are_bounded(boxed) -> None:
    names = ["RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CPU", "RLIMIT_CORE"]
    got = boxed(f"import resource\nprint(json.dumps([resource.getrlimit(getattr(resource, n)) for n in {names}]))")
    mine = Limits()
    want = [mine.process_bytes, mine.processes, mine.file_bytes, mine.open_files, mine.cpu_s, 0]
    assert got == [[w, w] for w in want] or os.geteuid() != 0


def test_boxes_at_the_same_time_have_different_users(kit: Path) -> None:
    with box(kit) as opened:
        if os.geteuid() != 0:
            pytest.skip("only root changes users")
        uids = {int(started(opened, "print(os.getuid(), flush=True); time.sleep(60)")[1]) for _ in range(2)}
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
    assert gone(marker)
    with box(kit):  # sweeps
        assert leftovers(grader.pid) == []
        assert not root.exists()


def test_standard_error_is_kept_and_bounded(kit: Path) -> None:
    with box(kit, "process") as opened:
        process = opened.popen(["-c", "import sys; sys.stderr.write('x' * 300_000 + 'the end')"], {})
        process.wait(timeout=30)
        assert opened.stderr(process).endswith("the end")
        assert len(opened.stderr(process)) == 1 << 16


def of_another_user() -> str:
    """An interpreter: one under a private home is out of an unprivileged user's reach."""
    for python in (sys.executable, "/usr/bin/python3"):
        if not fallback.why_not_uid(python):
            return python
    return pytest.skip(fallback.why_not_uid(sys.executable))


@pytest.mark.parametrize("isolation", ["uid", "process"])
def test_the_weaker_boxes_run_and_end(kit: Path, isolation: str) -> None:
    python = of_another_user() if isolation == "uid" else sys.executable
    marker = f"marker-{time.monotonic_ns()}"
    code = "import lab; os.fork(); print(os.getuid(), os.getcwd(), flush=True); time.sleep(100)"
    with box(kit, isolation, python=python) as opened:
        process, said = started(opened, code, marker)
        uid, folder = said.split()
        assert (int(uid) != os.getuid()) == (isolation == "uid")
        assert sorted(p.name for p in Path(opened.kit_path).iterdir()) == ["impl", "lab", "tests"]
        opened.kill(process)
        assert gone(marker)
        assert not Path(folder).exists()


def test_uid_isolation_ends_daemons_and_keeps_other_boxes_out(kit: Path) -> None:
    python, marker = of_another_user(), f"marker-{time.monotonic_ns()}"
    with box(kit, "uid", "bob", python) as bob:
        with box(kit, "uid", "alice", python) as alice:
            theirs = bob.submission_path + "/ddp/naive.py"
            assert (
                started(alice, f"try: print(open({theirs!r}).read())\nexcept OSError as e: print(e.errno)")[1] == "13\n"
            )
        process, said = started(bob, DAEMON, marker)
        assert said == "7\n"
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
