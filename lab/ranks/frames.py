"""Frames between a rank and the switch: the lengths of header and payload, a JSON header, the payload's bytes."""

import json
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

_encode = json.JSONEncoder(separators=(",", ":")).encode
_LENGTHS = struct.Struct("<IQ")
HEADER_LIMIT = 1 << 20
PAYLOAD_LIMIT = 1 << 30
_JOIN_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 18  # largest number of bytes per recvmsg call
_SENDER = struct.Struct("iII")  # struct ucred: process, user, group

Frame = tuple[dict[str, Any], bytearray]


class Malformed(ValueError):
    """The bytes do not form a frame."""


def pack(header: dict[str, Any], payload_bytes: int) -> bytes:
    """Return the bytes that precede the payload: both lengths and the header."""
    text = _encode(header).encode()
    return _LENGTHS.pack(len(text), payload_bytes) + text


def joined(parts: list[Any]) -> list[Any]:
    """Join parts into one if they are small, because each send call costs time. Return large parts as they are."""
    parts = [part for part in parts if len(part)]
    return [b"".join(parts)] if sum(map(len, parts)) <= _JOIN_BYTES else parts


class Reader:
    """Reads frames from a non-blocking socket as they arrive."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._unread = bytearray()
        self.pid = 0  # process id of the sender, reported by the kernel; 0: unknown
        if sys.platform == "linux":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def frames(self, limit: int) -> Iterator[Frame]:
        """Yield at most `limit` complete frames. Raises EOFError if the other end has closed, or Malformed."""
        pending = True
        while limit:
            if frame := self._next_frame():
                limit -= 1
                yield frame
            elif not pending:
                return
            else:
                pending = self._fill()

    def _next_frame(self) -> Frame | None:
        """Return the first frame and remove it from the buffer, or return None if it has not arrived completely."""
        if len(self._unread) < _LENGTHS.size:
            return None
        header_bytes, payload_bytes = _LENGTHS.unpack_from(self._unread)
        if header_bytes > HEADER_LIMIT or payload_bytes > PAYLOAD_LIMIT:
            raise Malformed(f"a frame of {header_bytes} + {payload_bytes} bytes")
        begin = _LENGTHS.size + header_bytes
        end = begin + payload_bytes
        if len(self._unread) < end:
            return None
        header = parsed(self._unread[_LENGTHS.size : begin])
        if payload_bytes < _CHUNK_BYTES:
            payload = self._unread[begin:end]
            del self._unread[:end]
        else:  # do not copy a large payload: remove the few bytes around it instead
            payload, self._unread = self._unread, self._unread[end:]
            del payload[end:], payload[:begin]
        return header, payload

    def _fill(self) -> bool:
        """Receive bytes that have arrived. Return whether more bytes may be waiting. Raises EOFError."""
        try:
            data, sender = self._socket.recvmsg(_CHUNK_BYTES, 0 if self.pid else socket.CMSG_SPACE(_SENDER.size))[:2]
        except BlockingIOError:
            return False
        except ConnectionError:
            data, sender = b"", []
        if not data:
            raise EOFError
        if sender:
            self.pid = _SENDER.unpack(sender[0][2])[0]
        self._unread += data
        return len(data) == _CHUNK_BYTES


def receive(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """Read a header from a blocking stream. Return it and the size of its payload in bytes. Raises EOFError."""
    header_bytes, payload_bytes = _LENGTHS.unpack(read_into(stream, bytearray(_LENGTHS.size)))
    return parsed(read_into(stream, bytearray(header_bytes))), payload_bytes


def read_into(stream: BinaryIO, buffer: Any) -> Any:
    """Fill `buffer` from a blocking, buffered stream, and return the buffer. Raises EOFError if the stream ends."""
    if stream.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]
        raise EOFError
    return buffer


def parsed(text: bytearray) -> dict[str, Any]:
    """Return the header in this JSON text. Raises Malformed if it is not a JSON object."""
    try:
        header = json.loads(text.decode())  # json would first detect the encoding of bytes
    except (ValueError, RecursionError):
        raise Malformed("a header that is not JSON") from None
    if type(header) is not dict:
        raise Malformed("a header that is not an object")
    return header
