"""From all formats that students send, unpacking takes only the code of the six stages."""

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader import hostile
from grader.hostile import archives
from grader.submissions import Submission, SubmissionError, UnpackLimits, find, hash_of, unpack
from lab.course.assignment import ROOT

from .classroom import raises_one_line as in_one_line

CODE = {"ddp/naive.py": b"x = 1\n", "ddp/__init__.py": b"", "zero/deep/er.py": b"y = 2\n", "answers.toml": b"a = 1\n"}


def a_zip(path: Path, members: dict[str, bytes], prefix: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(prefix + name, content)
    return path


def a_tar(path: Path, members: dict[str, bytes], prefix: str = "", extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in extra:
            archive.addfile(info)
    return path


def a_folder(path: Path, members: dict[str, bytes], prefix: str = "") -> Path:
    path.mkdir(exist_ok=True)
    for name, content in members.items():
        (path / (prefix + name)).parent.mkdir(parents=True, exist_ok=True)
        (path / (prefix + name)).write_bytes(content)
    return path


MAKERS = {"zip": a_zip, "tar": a_tar, "folder": a_folder}


def packed(kind: str, folder: Path, members: dict[str, bytes], prefix: str = "") -> Path:
    return MAKERS[kind](folder / {"zip": "in.zip", "tar": "in.tar.gz", "folder": "in"}[kind], members, prefix)


def files(root: Path) -> dict[str, bytes]:
    """The content of all files below `root`; of links and pipes, only the names."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() and not p.is_symlink() else b"special"
        for p in root.rglob("*")
        if p.is_symlink() or not p.is_dir()
    }


def unpacked(path: Path, tmp_path: Path, **limits: int) -> tuple[dict[str, bytes], str]:
    """Unpack. Return (the files afterwards, all notes)."""
    before = files(tmp_path)
    done = unpack(Submission("s", path), tmp_path / "out", UnpackLimits(**limits))
    assert {k: v for k, v in files(tmp_path).items() if not k.startswith("out/")} == before, "wrote elsewhere"
    return files(done.root), "\n".join(done.notes)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("prefix", ["", "hw/", "alice/hw/student/"])
def test_unpack_finds_code_in_any_format_and_folder_depth(tmp_path: Path, kind: str, prefix: str) -> None:
    sent = packed(kind, tmp_path, CODE | ({} if prefix else {"__MACOSX/x/._naive.py": b"junk"}), prefix)
    assert unpacked(sent, tmp_path)[0] == CODE


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("prefix", ["", "alice-repository/"])
def test_repository_submission_uses_its_student_folder(tmp_path: Path, kind: str, prefix: str) -> None:
    rest = {"tests/ddp/test_naive.py": b"", "lab/commands/cli.py": b"", "README.md": b"", "assignment.toml": b""}
    sent = packed(kind, tmp_path, {f"student/{n}": data for n, data in CODE.items()} | rest, prefix)
    assert unpacked(sent, tmp_path)[0] == CODE
    assert [s.path for s in find([sent])] == ([sent] if kind != "folder" or not prefix else [sent / "alice-repository"])


@pytest.mark.parametrize("kind", MAKERS)
def test_unrelated_files_are_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    junk = "conftest.py setup.py .git/config ddp/__pycache__/naive.cpython-311.pyc ddp/.hidden.py notes.ipynb "
    junk += "report.pdf ddp/data.bin ddp/conftest.py results.json grader/cli.py"
    got, notes = unpacked(packed(kind, tmp_path, CODE | dict.fromkeys(junk.split(), b"junk"), "hw/"), tmp_path)
    assert got == CODE
    assert f"left out {len(junk.split())} files" in notes, notes
    assert "1 .pdf" in notes, notes
    (tmp_path / "few").mkdir()
    few = packed(kind, tmp_path / "few", CODE | {"__init__.py": b"", "notes.txt": b""}, "hw/")
    _, notes = unpacked(few, tmp_path / "few")
    assert notes == "left out 1 file that is no part of a submission: hw/notes.txt"


@pytest.mark.parametrize("kind", MAKERS)
def test_unpacked_files_get_fixed_modes(tmp_path: Path, kind: str) -> None:
    sent = packed(kind, tmp_path, CODE)
    umask = os.umask(0o077)
    try:
        root = unpack(Submission("s", sent), tmp_path / "out").root
    finally:
        os.umask(umask)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


ODD = ["/etc/ddp/evil.py", "../ddp/evil.py", "ddp/../../evil.py", "C:/ddp/evil.py", "ddp\\evil.py", "ddp/e\x00.py",
       "ddp/e\nvil.py", "ddp/\x1b[31m.py", "ddp/" + "e" * 200 + ".py", "ddp/\u202eyp.py"]  # fmt: skip


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ODD)
def test_an_unsafe_name_is_left_out_and_named(tmp_path: Path, kind: str, name: str) -> None:
    if kind == "tar" and "\x00" in name:
        name = "ddp/e\x01.py"  # in tar, a NUL ends the name
    got, notes = unpacked(packed(kind, tmp_path, CODE | {name: b"evil"}), tmp_path)
    assert got == CODE
    assert "left out" in notes, notes
    assert len(notes.splitlines()) == 1, notes


def check_refused(path: Path, tmp_path: Path, *words: str, **limits: int) -> None:
    with in_one_line(SubmissionError, *words):
        unpack(Submission("s", path), tmp_path / "out", UnpackLimits(**limits))
    assert not (tmp_path / "out").exists(), "a refused submission left files behind"


REASONS = {"with-a-password": "encrypted", "one-name-twice": "twice", "bomb-within-the-limits": "200 times"}
ARCHIVES = {attack.name: attack for attack in hostile.read() if attack.archive}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused_or_its_honest_code_is_taken(tmp_path: Path, name: str) -> None:
    path = ARCHIVES[name].write(tmp_path)
    if not ARCHIVES[name].exercise:
        check_refused(path, tmp_path, REASONS.get(name, ""))
        return
    got, notes = unpacked(path, tmp_path)
    honest = (ROOT / "reference" / archives.EXERCISE).read_bytes()
    assert got[archives.EXERCISE] == honest
    assert set(got.values()) <= {honest, b"x = 1\n"}
    assert "left out" in notes or "link" in notes, notes


def test_symbolic_link_is_left_out_with_note(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "in", {"ddp/naive.py": b"x"})
    (folder / "ddp" / "link.py").symlink_to(tmp_path / "secret.py")
    got, notes = unpacked(folder, tmp_path)
    assert list(got) == ["ddp/naive.py"]
    assert "ddp/link.py: a symbolic link" in notes


@pytest.mark.parametrize("kind", MAKERS)
def test_limits_refuse_and_name_the_member(tmp_path: Path, kind: str) -> None:
    sent = packed(kind, tmp_path, CODE | {"ddp/large.py": os.urandom(5000), "ddp/" + "d/" * 13 + "x.py": b""})
    check_refused(sent, tmp_path, "nested")
    check_refused(sent, tmp_path, "ddp/large.py", file_bytes=4000, depth=20)
    check_refused(sent, tmp_path, "in all", total_bytes=4000, depth=20)
    check_refused(sent, tmp_path, "at most 3 files", files=3, depth=20)


def test_an_unusual_packing_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("ddp/pax.py")  # tarfile would read the whole header into memory
    info.pax_headers = {"comment": "x" * (40 << 20)}
    check_refused(a_tar(tmp_path / "p.tgz", {}, extra=(info,)), tmp_path, "p.tgz", "unpacks to over")
    check_refused(a_tar(tmp_path / "c.tgz", CODE | {"ddp/naive.py/x.py": b""}), tmp_path, "ddp/naive.py", "as a file")
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("ddp/x.py", "x = 1")
    check_refused(tmp_path / "in.zip", tmp_path, "ddp/x.py", "deflated")
    (tmp_path / "no.zip").write_text("not a zip")
    (tmp_path / "no.tgz").write_text("not a tar")
    check_refused(tmp_path / "no.zip", tmp_path, "no.zip")
    check_refused(tmp_path / "no.tgz", tmp_path, "no.tgz")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "content", [{}, {"essay.pdf": b""}, {"a/b/c/d/e/ddp/x.py": b""}, {"one/x.py": b"", "two/y.py": b""}]
)
def test_missing_stage_folder_error_lists_expected_and_found(tmp_path: Path, kind: str, content: dict) -> None:
    check_refused(packed(kind, tmp_path, content), tmp_path, "benchmarking", "ddp", "found: ")


def test_find_takes_folders_archives_and_folders_of_those(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    a_folder(tmp_path / "class" / "alice", CODE)
    a_folder(tmp_path / "class" / "bob", CODE, "hw/")
    a_zip(tmp_path / "class" / "alice.zip", CODE)
    a_tar(tmp_path / "class" / "Alice (2).tar.gz", CODE)
    (tmp_path / "class" / "grades.csv").write_text("")
    (tmp_path / "class" / "__MACOSX").mkdir()
    assert [s.name[:8] for s in find([tmp_path / "class"])] == ["Alice_2~", "alice", "alice~62", "bob"]
    assert [s.name for s in find([tmp_path / "class" / "alice"])] == ["alice"]
    assert next(s.name for s in find([tmp_path / "class" / "alice.zip", tmp_path / "class"])) == "alice"
    assert len(find([tmp_path / "class" / "alice.zip", tmp_path / "class"])) == 4, "one path given twice is one"


@pytest.mark.parametrize("newcomers", [["_bob"], ["bob!", "bob "], ["-bob", "bob~0", "BOB?"]])
def test_new_submissions_never_change_existing_names(tmp_path: Path, newcomers: list[str]) -> None:
    def names() -> dict[str, str]:
        return {s.path.name: s.name for s in find([tmp_path], messages.append)}

    messages: list[str] = []
    for name in ("bob", "bo*b", "ada@uni.edu"):
        a_zip(tmp_path / f"{name}.zip", CODE)
    before = names()
    assert (before["bob.zip"], before["ada@uni.edu.zip"]) == ("bob", "ada@uni.edu")
    for name in newcomers:
        a_zip(tmp_path / f"{name}.zip", CODE)
    after = names()
    assert before.items() <= after.items()
    assert len({n.casefold() for n in after.values()}) == len(after)
    assert "bo*b.zip is bo_b~" in messages[0]


FORK = {"tests/adapters.py": b"", "cs336_systems/ddp.py": b"", "cs336-basics/tests/adapters.py": b""}


@pytest.mark.parametrize(
    ("folders", "doubt", "names"),
    [
        ({"student": CODE, "ada": CODE, "bob": CODE}, "student", ["ada", "bob", "student"]),
        ({"zero": {}, "ada": CODE}, "", ["ada", "zero"]),
        ({"zero": CODE, "mesh": {"student/ddp/naive.py": b""}}, "", ["mesh", "zero"]),
        ({"ddp": {"naive.py": b""}, "ada": CODE, "bob": {"hw/ddp/naive.py": b""}}, "ddp", ["ada", "bob", "ddp"]),
        ({"tests": {"adapters.py": b""}, "ada": FORK, "bob": FORK}, "tests", ["ada", "bob", "tests"]),
        ({"ddp": {"naive.py": b""}, "zero": {"zero1.py": b""}, "old": CODE}, "old", ["in"]),
        ({"student": CODE, "lab": {"cli.py": b""}, "tests": {"ddp/test_naive.py": b""}}, "", ["in"]),
        ({"tests": {"adapters.py": b""}, "cs336-basics": FORK, "cs336_systems": {}}, "", ["in"]),
        ({"ddp": {"mine.py": b""}}, "", ["in"]),
    ],
)
def test_find_separates_class_folders_from_single_submissions(tmp_path, folders: dict, doubt: str, names: list) -> None:
    (tmp_path / "in").mkdir()
    for name, content in folders.items():
        a_folder(tmp_path / "in" / name, content)
    messages: list[str] = []
    assert [s.name for s in find([tmp_path / "in"], messages.append)] == names
    assert len(messages) == bool(doubt), messages
    assert all(doubt in line and "taken as" in line for line in messages)


def test_paths_without_code_and_linked_submissions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("")
    for path in (tmp_path, tmp_path / "x.csv", tmp_path / "missing"):
        with pytest.raises(SubmissionError, match="expected"):
            find([path])
    a_folder(tmp_path / "real", CODE)
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "mallory").symlink_to(tmp_path / "real")
    (found,) = find([tmp_path / "class"])
    check_refused(found.path, tmp_path, "link")


def test_the_hash_follows_names_and_contents(tmp_path: Path) -> None:
    one, two = a_folder(tmp_path / "1", CODE), a_folder(tmp_path / "2", dict(reversed(CODE.items())))
    assert hash_of(one) == hash_of(two)
    (two / "ddp" / "naive.py").write_text("x = 2\n")
    assert hash_of(one) != hash_of(two)
    assert hash_of(a_folder(tmp_path / "3", {"a": b"bc"})) != hash_of(a_folder(tmp_path / "4", {"ab": b"c"}))


NAMES = st.lists(
    st.sampled_from(
        ["ddp", "zero", "..", ".", "", "x.py", "naive.py", ".git", "conftest.py", "C:", "\\", "é.py", "\n", "hw"]
    )
    | st.text(max_size=6),
    min_size=1,
    max_size=5,
).map("/".join)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(NAMES, st.binary(max_size=20), max_size=8), st.sampled_from(["zip", "tar"]))
def test_unpack_writes_only_stage_code_for_any_member_names(tmp_path_factory, members: dict, kind: str) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    try:
        sent = packed(kind, tmp_path, members)
    except (UnicodeEncodeError, ValueError, IndexError):
        return  # such an archive cannot be written
    got = attempted(sent, tmp_path)
    for path, content in got.items():
        assert path in ("answers.toml", "writeup.md") or (path.split("/")[0] in STAGES and path.endswith(".py")), path
        assert content in members.values()


def attempted(path: Path, tmp_path: Path) -> dict[str, bytes]:
    """Return the unpacked files; none if the submission was refused. Any other exception is a bug."""
    try:
        return unpacked(path, tmp_path)[0]
    except SubmissionError as error:
        message = str(error)
    assert "\n" not in message
    return {}


STAGES = ("benchmarking", "mixed_precision", "flash_attention", "ddp", "zero", "mesh")


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(["zip", "tar"]))
def test_damaged_archive_raises_only_submission_error(tmp_path_factory, data, kind: str) -> None:
    tmp_path = tmp_path_factory.mktemp("damaged")
    sent = packed(kind, tmp_path, CODE)
    content = bytearray(sent.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    sent.write_bytes(content)
    attempted(sent, tmp_path)
