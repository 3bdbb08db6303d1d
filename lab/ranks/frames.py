"""Frames between a rank and the switch: the lengths of both parts, a JSON header, raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<IQ")
HEADER_LIMIT = 1 << 20
PAYLOAD_LIMIT = 1 << 30
_LITTLE = 1 << 16

Frame = tuple[dict[str, Any], bytearray]


class Malformed(ValueError):
    """Bytes that are no frame."""


def pack(header: dict[str, Any], payload_bytes: int) -> bytes:
    """What stands before the payload."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), payload_bytes) + text


def joined(parts: list[Any]) -> list[Any]:
    """What to send one after the other: all of it at once where that is little, since each call takes its time."""
    parts = [part for part in parts if len(part)]
    return [b"".join(parts)] if sum(map(len, parts)) <= _LITTLE else parts


class Reader:
    """The frames of a non-blocking socket, as they come."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._chunk = bytearray(1 << 16)
        self._start = self._end = 0  # of what lies in the chunk and has not been taken
        self._part = bytearray()  # that is being filled, …
        self._filled = 0  # … so far
        self._stage = 0  # which part of a frame that is: lengths, header, payload
        self._header: dict[str, Any] = {}
        self._payload_bytes = 0
        self._begin(0, _LENGTHS.size)

    def frames(self, most: int) -> Iterator[Frame]:
        """Up to so many that are there. Raises EOFError when the other end has closed, Malformed."""
        while most and self._fill():
            part, stage = self._part, self._stage
            if stage == 0:
                header_bytes, self._payload_bytes = _LENGTHS.unpack(part)
                if header_bytes > HEADER_LIMIT or self._payload_bytes > PAYLOAD_LIMIT:
                    raise Malformed(f"a frame of {header_bytes} + {self._payload_bytes} bytes")
                self._begin(1, header_bytes)
            elif stage == 1:
                self._header = parsed(part)
                self._begin(2, self._payload_bytes)
            else:
                most -= 1
                self._begin(0, _LENGTHS.size)
                yield self._header, part

    def _begin(self, stage: int, size: int) -> None:
        self._stage, self._part, self._filled = stage, bytearray(size), 0

    def _fill(self) -> bool:
        """Whether the part that is being filled is whole."""
        while (left := len(self._part) - self._filled) > 0:
            if self._start < self._end:
                count = min(left, self._end - self._start)
                self._part[self._filled : self._filled + count] = self._chunk[self._start : self._start + count]
                self._start += count
            elif left < len(self._chunk):
                self._start, self._end = 0, self._receive(memoryview(self._chunk))
                count = 0
                if not self._end:
                    return False
            elif not (count := self._receive(memoryview(self._part)[self._filled :])):
                return False
            self._filled += count
        return True

    def _receive(self, view: memoryview) -> int:
        """Bytes that came; 0 where there are none yet."""
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError
        return count


def receive(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of the next frame of a blocking stream, and how many bytes of payload follow. Raises EOFError."""
    header_bytes, payload_bytes = _LENGTHS.unpack(into(stream, bytearray(_LENGTHS.size)))
    return parsed(into(stream, bytearray(header_bytes))), payload_bytes


def into(stream: BinaryIO, buffer: Any) -> Any:
    """Fill `buffer` from a blocking, buffered stream, and return it. Raises EOFError."""
    if stream.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]
        raise EOFError
    return buffer


def parsed(text: bytearray) -> dict[str, Any]:
    """A header. Raises Malformed."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("a header that is not JSON") from None
    if type(header) is not dict:
        raise Malformed("a header that is not an object")
    return header
