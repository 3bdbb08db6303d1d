"""Frames between a rank and the switch: the lengths of header and payload, a JSON header, the payload's bytes."""

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
    """The bytes do not form a frame."""


def pack(header: dict[str, Any], payload_bytes: int) -> bytes:
    """Return the bytes that precede the payload: both lengths and the header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), payload_bytes) + text


def joined(parts: list[Any]) -> list[Any]:
    """Join small parts into one, because each send call costs time. Return large parts as they are."""
    parts = [part for part in parts if len(part)]
    return [b"".join(parts)] if sum(map(len, parts)) <= _LITTLE else parts


class Reader:
    """Reads frames from a non-blocking socket as they arrive."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._chunk = bytearray(1 << 16)
        self._start = self._end = 0  # range of the chunk's unread bytes
        self._part = bytearray()  # the part of a frame that is being read
        self._filled = 0  # how many of its bytes have arrived
        self._stage = 0  # which part it is: 0 lengths, 1 header, 2 payload
        self._header: dict[str, Any] = {}
        self._payload_bytes = 0
        self._begin(0, _LENGTHS.size)

    def frames(self, most: int) -> Iterator[Frame]:
        """Yield at most `most` complete frames. Raises EOFError if the other end has closed, or Malformed."""
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
        """Read into the current part. Return whether it is complete."""
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
        """Receive into `view`. Return the number of bytes; 0 if none have arrived yet."""
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
    """Read a frame's header from a blocking stream. Return it and the payload's size in bytes. Raises EOFError."""
    header_bytes, payload_bytes = _LENGTHS.unpack(into(stream, bytearray(_LENGTHS.size)))
    return parsed(into(stream, bytearray(header_bytes))), payload_bytes


def into(stream: BinaryIO, buffer: Any) -> Any:
    """Fill `buffer` from a blocking, buffered stream, and return it. Raises EOFError."""
    if stream.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]
        raise EOFError
    return buffer


def parsed(text: bytearray) -> dict[str, Any]:
    """Parse a header. Raises Malformed."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("a header that is not JSON") from None
    if type(header) is not dict:
        raise Malformed("a header that is not an object")
    return header
