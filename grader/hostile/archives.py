"""Writes hostile archives when they are needed, so that the repository contains nothing dangerous.

Most functions add something hostile to the honest code of `EXERCISE`. Each returns the path of the submission.
"""

import gzip
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from lab.course.assignment import ROOT

EXERCISE = "benchmarking/straggler.py"
_MIB = 1 << 20
_LINK, _DEVICE = stat.S_IFLNK | 0o777, stat.S_IFCHR | 0o666
_GRADEBOOK = "../../gradebook.sqlite"  # as seen from the folder a submission is unpacked into


def _honest() -> bytes:
    return (ROOT / "reference" / EXERCISE).read_bytes()


def _zip(path: Path, members: Iterable[tuple[str, bytes, int]]) -> Path:
    """members: (name, content, mode of the file; 0 for a regular file)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, mode << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return path


def _tar(path: Path, members: Iterable[tuple[str, bytes, bytes, str]]) -> Path:
    """members: (name, content, type, target of a link or "")."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zip_of_zeros(folder: Path, name: str) -> Path:
    """A source file of 3 MiB, compressed a thousand to one."""
    bomb = b"#" + bytes(3 * _MIB)
    return _zip(folder / f"{name}.zip", [(EXERCISE, _honest(), 0), ("benchmarking/notes.py", bomb, 0)])


def zip_of_one_large_file(folder: Path, name: str) -> Path:
    """A file of 256 MiB, compressed to a quarter of a MiB."""
    path = folder / f"{name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(EXERCISE, _honest())
        with archive.open("benchmarking/notes.py", "w", force_zip64=True) as stream:
            for _ in range(16):
                stream.write(bytes(16 * _MIB))
    return path


def zip_that_lies_about_sizes(folder: Path, name: str) -> Path:
    """The directory claims 10 bytes for a file that unpacks to 8 MiB."""
    path = _zip(folder / f"{name}.zip", [("benchmarking/notes.py", os.urandom(_MIB) * 8, 0), (EXERCISE, _honest(), 0)])
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\1\2")
    data[directory + 24 : directory + 28] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def zip_of_many_members(folder: Path, name: str) -> Path:
    """60,000 empty members: slow to list, and large in memory."""
    many = ((f"benchmarking/{i}.py", b"", 0) for i in range(60_000))
    return _zip(folder / f"{name}.zip", [(EXERCISE, _honest(), 0), *many])


def zip_within_a_zip(folder: Path, name: str) -> Path:
    """The code lies forty archives deep."""
    inner = _honest()
    for _ in range(40):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("inner.zip", inner)
        inner = buffer.getvalue()
    return _zip(folder / f"{name}.zip", [("inner.zip", inner, 0)])


def zip_of_deep_folders(folder: Path, name: str) -> Path:
    """A path of two hundred folders below a stage."""
    deep = "benchmarking/" + "a/" * 200 + "notes.py"
    return _zip(folder / f"{name}.zip", [(EXERCISE, _honest(), 0), (deep, b"x = 1\n", 0)])


def zip_out_of_its_folder(folder: Path, name: str) -> Path:
    """Names that leave the folder: with .., absolute paths, and Windows paths."""
    forged = b"raise SystemExit(0)\n"
    names = (
        _GRADEBOOK, "benchmarking/../../../conftest.py", "/tmp/conftest.py", "C:\\conftest.py", "..\\..\\conftest.py",
    )  # fmt: skip
    return _zip(folder / f"{name}.zip", [(EXERCISE, _honest(), 0), *((n, forged, 0) for n in names)])


def zip_with_links(folder: Path, name: str) -> Path:
    """Links to files that the grader can read, in place of code, and a file whose folder is a link."""
    return _zip(folder / f"{name}.zip", [
        (EXERCISE, _honest(), 0), ("benchmarking/answers.py", b"/etc/passwd", _LINK),
        ("ddp", b"/", _LINK), ("ddp/tmp/owned.py", b"x = 1\n", 0), ("mesh/book.py", _GRADEBOOK.encode(), _LINK),
    ])  # fmt: skip


def zip_that_names_a_file_twice(folder: Path, name: str) -> Path:
    """Two readers may choose different versions: one version is scanned, and the other one runs."""
    path = folder / f"{name}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(EXERCISE, _honest())
        archive.writestr("./" + EXERCISE, b"import os\nos._exit(0)\n")
    return path


def zip_with_odd_names(folder: Path, name: str) -> Path:
    """Names that confuse a terminal, a page, a spreadsheet or a file system."""
    odd = ("benchmarking/\x1b[2J.py", "benchmarking/<script>alert(1)</script>.py", "benchmarking/=1+1.py",
           "benchmarking/\u202eyp.gnihton", "benchmarking/a\x00b.py", "benchmarking/" + "x" * 250 + ".py",
           "benchmarking/CON.py", "benchmarking/'; DROP TABLE result; --.py")  # fmt: skip
    return _zip(folder / f"{name}.zip", [(EXERCISE, _honest(), 0), *((n, b"x = 1\n", 0) for n in odd)])


def zip_with_a_password(folder: Path, name: str) -> Path:
    """The headers claim that the code is encrypted."""
    path = _zip(folder / f"{name}.zip", [(EXERCISE, _honest(), 0)])
    data = bytearray(path.read_bytes())
    for header, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(header) + flags] |= 1
    path.write_bytes(data)
    return path


def tar_with_devices_and_links(folder: Path, name: str) -> Path:
    """A hard link, a device, a pipe that blocks its reader, a file below a link, and a path to the gradebook."""
    return _tar(folder / f"{name}.tar.gz", [
        (EXERCISE, _honest(), tarfile.REGTYPE, ""), ("benchmarking/a.py", b"", tarfile.LNKTYPE, "/etc/passwd"),
        ("benchmarking/b.py", b"", tarfile.CHRTYPE, ""), ("benchmarking/c.py", b"", tarfile.FIFOTYPE, ""),
        ("ddp", b"", tarfile.SYMTYPE, "/tmp"), ("ddp/owned.py", b"x = 1\n", tarfile.REGTYPE, ""),
        (_GRADEBOOK, b"forged", tarfile.REGTYPE, ""),
    ])  # fmt: skip


def tar_bomb(folder: Path, name: str) -> Path:
    """One member of 256 MiB of zeros, compressed to a quarter of a MiB."""
    path = folder / f"{name}.tar.gz"
    info = tarfile.TarInfo("benchmarking/notes.py")
    info.size = 256 * _MIB
    with gzip.open(path, "wb") as packed:
        packed.write(info.tobuf())
        for _ in range(16):
            packed.write(bytes(16 * _MIB))
    return path


def folder_of_links(folder: Path, name: str) -> Path:
    """A folder whose stages are links to the reference and to the root."""
    path = folder / name
    (path / "benchmarking").mkdir(parents=True)
    (path / "benchmarking" / "straggler.py").symlink_to(ROOT / "reference" / EXERCISE)
    (path / "ddp").symlink_to(ROOT / "reference" / "ddp")
    (path / "mesh").symlink_to("/")
    os.mkfifo(path / "benchmarking" / "pipe.py")
    return path


def no_archive(folder: Path, name: str) -> Path:
    """A program whose name ends in .zip."""
    path = folder / f"{name}.zip"
    path.write_bytes(b"\x7fELF" + os.urandom(4096))
    return path
