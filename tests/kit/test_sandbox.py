"""Code in the sandbox finds nothing secret, and changes nothing outside.

Spies also run without a sandbox, where they must find something; otherwise they would prove nothing.
"""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grader import sandbox
from grader.sandbox import Sandbox, SandboxError, choose

from .boxes import HIDDEN, KIT, SECRET, box, in_a_box, started

BOTH = pytest.mark.parametrize("isolation", ["bubblewrap", "process"])


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
    half = len(SECRET) // 2  # in two parts, so that the spy does not find its own source
    prefixes = f"TOP, PREFIX, BASE = {str(top)!r}, {sys.prefix!r}, {sys.base_prefix!r}\n"
    return f"SECRET = {SECRET[:half]!r} + {SECRET[half:]!r}\n" + prefixes + code


@BOTH
def test_no_hidden_file_can_be_read_inside(kit: Path, isolation: str) -> None:
    """Without a sandbox, the spy searches only the kit, and finds all hidden files, bob's file and alice's link."""
    top, count = ("/", 0) if isolation == "bubblewrap" else (kit, len(HIDDEN) + 2)
    assert len(in_a_box(kit, spy(SPY_FILES, top), isolation)) == count


def test_gpus_are_seen_inside_and_other_devices_are_not(boxed, monkeypatch) -> None:
    """The job's choice of GPUs is visible too. /dev/kmsg stands for a GPU."""
    code = "print(json.dumps([os.path.exists('/dev/kmsg'), os.environ.get('CUDA_VISIBLE_DEVICES')]))"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert boxed(code) == [False, None]
    monkeypatch.setattr(sandbox.bubblewrap, "devices", lambda: [Path("/dev/kmsg")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert boxed(code) == [True, "1"]


def test_sandboxed_kit_holds_only_lab_probes_and_submission(boxed) -> None:
    seen = boxed("print(json.dumps(sorted(os.path.join(d, f) for d, _, fs in os.walk('/kit') for f in fs)))")
    assert seen == ["/kit/impl/ddp/naive.py", "/kit/lab/__init__.py", "/kit/tests/__init__.py",
                    "/kit/tests/ddp/__init__.py", "/kit/tests/ddp/probes.py",
                    "/kit/tests/ddp/probes_more.py"]  # fmt: skip
    assert boxed("import lab, tests.ddp.probes as p; print(json.dumps([lab.WHERE, p.WHERE]))") == [
        "/kit/lab/__init__.py",
        "/kit/tests/ddp/probes.py",
    ]


def test_the_repository_around_a_virtual_environment_looks_empty(boxed) -> None:
    entries = boxed(f"p = {str(KIT)!r}; print(json.dumps(os.listdir(p) if os.path.exists(p) else []))")
    assert set(entries) <= {Path(sys.prefix).name}


def test_a_virtual_environment_below_tmp_is_seen(kit: Path, tmp_path: Path) -> None:
    """The sandbox's own /tmp must not hide the interpreter of a checkout in /tmp."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    with box(kit, python=str(venv / "bin" / "python")) as opened:
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
    parents = {part for path in (sys.prefix, sys.base_prefix) for part in Path(path).parts}
    assert set(home) <= parents, "of the home only the way to the interpreter is there"
    assert (homes, shadow) == (None, None)


def test_sandbox_environment_drops_inherited_variables(boxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_SECRET", SECRET)
    minimum = {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"}
    environment = boxed("print(json.dumps(dict(os.environ)))")
    assert set(environment) == minimum | {"GIVEN", "SHARDLINGS_BOX"}
    assert SECRET not in str(environment)


# The caller passes the folders, since without a sandbox this really writes, as root to any file.
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
    written = folders = [str(tmp_path)]  # without a sandbox, only here, where every write succeeds
    files = [str(tmp_path / "forged")]
    if isolation == "bubblewrap":
        written = ["/tmp", "/dev/shm"]
        folders = ["/", "/kit", "/kit/lab", "/kit/impl", "/kit/impl/ddp", "/usr", "/usr/lib", "/etc", "/dev", "/sys",
                   "/proc", "/var", sys.prefix, sys.base_prefix, *written]  # fmt: skip
        files = ["/kit/lab/__init__.py", "/kit/impl/ddp/naive.py", "/etc/passwd", "/proc/sys/kernel/hostname"]
    got = in_a_box(kit, f"FOLDERS, FILES = {folders!r}, {files!r}\n" + WRITE, isolation)
    assert got == (written if isolation == "bubblewrap" else written + files)


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
try: socket.socket(40, socket.SOCK_STREAM); vsock = 0
except OSError as error: vsock = error.errno
print(json.dumps([loop, [n for _, n in socket.if_nameindex()], reached, vsock]))
"""


@BOTH
def test_the_only_network_is_its_own_loopback(kit: Path, tmp_path: Path, isolation: str) -> None:
    abstract = f"\0shardlings-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as host, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        targets = [[int(socket.AF_INET), host.getsockname()], [int(socket.AF_UNIX), abstract]]
        loop, names, reached, vsock = in_a_box(kit, f"TARGETS = {targets!r}\n" + CONNECT, isolation)
    assert loop == "hello"
    assert len(reached) == (0 if isolation == "bubblewrap" else 2)
    assert (names, vsock) == (["lo"], errno.EAFNOSUPPORT) or isolation == "process"


def test_inherited_descriptors_are_invisible(boxed, tmp_path: Path) -> None:
    (tmp_path / "open").write_text(SECRET)
    fd = os.open(tmp_path / "open", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert boxed("print(json.dumps(sorted(f for f in os.listdir('/proc/self/fd') if int(f) > 3)))") == []
    finally:
        os.close(fd)


def test_standard_error_is_kept_and_bounded(kit: Path) -> None:
    with box(kit, "process") as opened:
        process = opened.open(["-c", "import sys; sys.stderr.write('x' * 300_000 + 'the end')"], {})
        process.wait(timeout=30)
        assert opened.error_output(process).endswith("the end")
        assert len(opened.error_output(process)) == 1 << 16


def test_sandbox_fails_closed_when_isolation_is_unavailable(monkeypatch: pytest.MonkeyPatch, kit: Path) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: {"bubblewrap": "not installed", "uid": "no", "process": ""})
    for wanted in (None, "bubblewrap", "uid", "nonsense"):
        with pytest.raises(SandboxError, match="expected an isolation" if wanted == "nonsense" else "isolation: no"):
            choose(wanted)
    assert choose("process") == "process"
    with pytest.raises(SandboxError, match="expected a folder"):
        Sandbox("process", kit / "nobody", kit)
