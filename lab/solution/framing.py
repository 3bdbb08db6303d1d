"""Messages on a pipe: a JSON header and blobs, each preceded by its length. The ends need not trust each other."""

import json
import os
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<Q")
HEADER_LIMIT = 8 << 20
BLOB_LIMIT = 1 << 30
PROBE, GIVE_UP = b"P", b"G"  # PROBE precedes a request and carries the ranks' sockets; GIVE_UP reports a deadlock
FORGED = "an answer that did not come from the probe"


class Closed(EOFError):
    """The other end is gone."""


class TimedOut(TimeoutError):
    """No complete message arrived in time."""


def send(fd: int, header: dict, blobs: list[bytes] | tuple[bytes, ...] = ()) -> None:
    """Write one message; blocks until the other end has taken it."""
    text = json.dumps({**header, "blobs": [len(b) for b in blobs]}).encode("ascii")
    _write(fd, _LENGTH.pack(len(text)) + text)
    for blob in blobs:
        _write(fd, blob)


def receive(fd: int, deadline: float | None = None) -> tuple[dict, list[bytes]]:
    """Read one message. deadline: in time.monotonic() seconds. Raises Closed, TimedOut, or ValueError if malformed."""
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    if length > HEADER_LIMIT:
        raise ValueError(f"header of {length} bytes; at most {HEADER_LIMIT}")
    header = json.loads(_read(fd, length, deadline))
    sizes = header.pop("blobs", None) if type(header) is dict else None
    if type(sizes) is not list or not all(type(n) is int and n >= 0 for n in sizes) or sum(sizes) > BLOB_LIMIT:
        raise ValueError("header without honest blob sizes")
    return header, [_read(fd, n, deadline) for n in sizes]


def _write(fd: int, data: bytes) -> None:
    view: Any = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        raise Closed("the other end closed the pipe") from None


def _read(fd: int, n: int, deadline: float | None) -> bytes:
    parts = []
    while n:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise TimedOut("no complete message in time")
        part = os.read(fd, min(n, 1 << 20))
        if not part:
            raise Closed("the other end closed the pipe")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
