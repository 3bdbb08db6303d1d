"""Reads an untrusted folder, .zip or .tar.gz: first the list of members, then the bytes of selected members.

Every source checks names the same way. It limits the bytes that it reads, whatever sizes the headers claim.
"""

import contextlib
import functools
import gzip
import io
import os
import stat
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import InputError

SUFFIXES = (".zip", ".tar.gz", ".tgz")
_MEMBERS = 50_000  # of any kind; .git and caches have many
# Exceptions that zipfile, tarfile, gzip and zlib raise for a broken archive
_READ_ERRORS = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError,
    ValueError, KeyError, IndexError, OverflowError,
)  # fmt: skip


class SubmissionError(InputError):
    """The submission cannot be unpacked; the message names the member."""


@dataclass(frozen=True)
class UnpackLimits:
    files: int = 2_000
    total_bytes: int = 64 << 20
    file_bytes: int = 4 << 20
    ratio: int = 200  # unpacked over packed
    depth: int = 12


@dataclass(frozen=True)
class Member:
    name: str  # as the archive or folder spells it
    kind: str  # "file", "folder", or words for anything else: "a symbolic link"
    parts: tuple[str, ...]  # () when the name is unsafe
    problem: str  # why the name is unsafe; else ""
    size: int = 0  # bytes, as the header claims

    @property
    def shown(self) -> str:
        return _shown(self.name)


Entry = tuple[str, str, int, Callable[[], bytes]]  # name, kind, size that the header claims, function that reads it


class Source(ABC):
    def __init__(self, path: Path, limits: UnpackLimits):
        self.path, self.limits = path, limits

    def members(self) -> Iterator[Member]:
        """Yield all members. Raises SubmissionError if the archive is broken, or has too many members or bytes."""
        with self._errors_of(self.path.name):
            for count, (name, kind, size, _) in enumerate(self._entries()):
                if count >= _MEMBERS:
                    raise SubmissionError(f"{self.path.name}: expected at most {_MEMBERS} members; hand in the stages")
                yield _checked(name, kind, size)

    def read(self, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of each wanted file. Raises SubmissionError if a file is broken or a limit exceeded."""
        total = 0
        with self._errors_of(self.path.name):
            for name, kind, _, read in self._entries():
                if name in wanted and kind == "file":
                    with self._errors_of(name):
                        content = read()
                    total += len(content)
                    if total > self.limits.total_bytes:
                        limit = f"{self.limits.total_bytes >> 20} MiB"
                        raise SubmissionError(f"{name}: expected at most {limit} in all; hand in less")
                    yield name, content

    @abstractmethod
    def _entries(self) -> Iterator[Entry]:
        """Yield every member. The caller must read a member before it requests the next one."""

    def _content(self, name: str, stream: IO[bytes], size: int | None = None) -> bytes:
        content = stream.read(self.limits.file_bytes + 1)
        if len(content) > self.limits.file_bytes:
            raise SubmissionError(f"{name}: expected at most {self.limits.file_bytes >> 20} MiB; it is no source file")
        if size not in (None, len(content)):
            raise SubmissionError(f"{name}: says {size} bytes, has {len(content)}; pack it anew")
        return content

    @contextlib.contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Turn the exceptions of a broken archive into a SubmissionError of one line that names the member."""
        try:
            yield
        except SubmissionError:
            raise
        except _READ_ERRORS as error:
            why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise SubmissionError(f"{_shown(name)}: cannot be read ({why}); pack it anew") from None


def _shown(name: str) -> str:
    """Return the name, escaped and shortened to fit on one line of a message."""
    return repr(name)[1:-1][:120]


def open_source(path: Path, limits: UnpackLimits) -> Source:
    """Return the reader for a path. Raises SubmissionError for a link or an unknown kind of file."""
    if path.is_symlink():
        raise SubmissionError(f"{path.name}: expected a folder or an archive, it is a link; give its target instead")
    name = path.name.lower()
    if path.is_dir():
        return _Folder(path, limits)
    if path.is_file() and name.endswith(".zip"):
        return _Zip(path, limits)
    if path.is_file() and name.endswith(SUFFIXES):
        return _Tar(path, limits)
    raise SubmissionError(f"{path.name}: expected a folder or {', '.join(SUFFIXES)}; check the path")


class _Folder(Source):
    def _entries(self) -> Iterator[Entry]:
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            with os.scandir(self.path / folder) as entries:
                for entry in sorted(entries, key=lambda e: e.name):
                    name, kind, size = f"{folder}{entry.name}", "file", 0
                    if not entry.is_dir(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        kind, size = _kind_of(info.st_mode), info.st_size
                    elif not entry.name.startswith("."):  # do not enter .git or .venv: each counts as one member
                        if name.count("/") >= 30:
                            continue
                        name, kind = f"{name}/", "folder"
                        waiting.append(name)
                    yield name, kind, size, functools.partial(self._read, name)

    def _read(self, name: str) -> bytes:
        fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SubmissionError(f"{name}: expected a regular file, it changed meanwhile; try again")
            return self._content(name, stream)


class _Zip(Source):
    def _entries(self) -> Iterator[Entry]:
        self._check_directory()
        with zipfile.ZipFile(self.path) as archive:
            for info in archive.infolist():
                mode = info.external_attr >> 16 if info.create_system == 3 else 0
                kind = "folder" if info.is_dir() else _kind_of(mode) if stat.S_IFMT(mode) else "file"
                name = info.orig_filename  # zipfile cuts .filename at a NUL
                yield name, kind, info.file_size, functools.partial(self._read, archive, info)

    def _read(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
        name = info.orig_filename
        if info.flag_bits & 1:
            raise SubmissionError(f"{name}: expected no password, it is encrypted; zip it without one")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SubmissionError(f"{name}: expected a plain (deflated) zip; zip it with the usual tool")
        with archive.open(info) as stream:
            content = self._content(name, stream, info.file_size)
        if len(content) > max(self.limits.ratio * info.compress_size, 1 << 16):
            raise SubmissionError(f"{name}: unpacks to over {self.limits.ratio} times its size; no source does")
        return content

    def _check_directory(self) -> None:
        """Check the size that the zip claims for its directory, because zipfile loads all of it into memory."""
        with open(self.path, "rb") as stream:
            stream.seek(max(0, self.path.stat().st_size - 66_000))
            tail = stream.read()
        end = tail.rfind(b"PK\5\6")
        if end < 0 or len(tail) < end + 22:
            raise SubmissionError(f"{self.path.name}: expected a zip archive, it is not one or is cut off; zip it anew")
        size, zip64 = int.from_bytes(tail[end + 12 : end + 16], "little"), b"PK\6\7" in tail[max(0, end - 20) : end]
        if size > _MEMBERS * 400 or zip64:
            raise SubmissionError(f"{self.path.name}: expected at most {_MEMBERS} members; hand in only the stages")


class _Tar(Source):
    def _entries(self) -> Iterator[Entry]:
        with open(self.path, "rb") as packed:
            stream = _Budget(gzip.GzipFile(fileobj=packed), self.path, self.limits)
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for info in archive:
                    yield info.name, _tar_kind(info), info.size, functools.partial(self._read, archive, info)
                    archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every member in memory

    def _read(self, archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
        stream = archive.extractfile(info)
        assert stream is not None, "it is a file"
        return self._content(info.name, stream, info.size)


class _Budget(io.RawIOBase):
    """A stream that raises when an archive unpacks to far more bytes than its size justifies."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, path: Path, limits: UnpackLimits):
        self.stream, self.path, self.total = stream, path, 0
        self.limit = min(4 * limits.total_bytes, max(limits.ratio * path.stat().st_size, 1 << 20))

    def read(self, size: int = -1) -> bytes:
        block = self.stream.read(size)
        self.total += len(block)
        if self.total > self.limit:
            raise SubmissionError(f"{self.path.name}: unpacks to over {self.limit >> 20} MiB; hand in only the stages")
        return block


def _checked(name: str, kind: str, size: int) -> Member:
    """Return a Member with the parts of its name, or with the reason why the name is unsafe."""
    parts = tuple(p for p in name.split("/") if p not in ("", "."))
    problem = ""
    if name.startswith("/") or (len(name) > 1 and name[1] == ":"):
        problem = "an absolute path"
    elif ".." in parts:
        problem = "a path out of the archive"
    elif not name.isprintable() or "\\" in name:
        problem = "odd characters in its name"
    elif any(len(p.encode()) > 120 for p in parts) or len(name.encode()) > 1000:
        problem = "too long a name"
    return Member(name, kind, () if problem else parts, problem, size)


def _kind_of(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    return "a symbolic link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"


def _tar_kind(info: tarfile.TarInfo) -> str:
    if info.issparse():
        return "a sparse file"
    kinds = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link"}
    return kinds.get(info.type, "file" if info.isreg() else "a device, pipe or socket")
