"""Carries values between a probe's process and its judge: JSON for structure, safetensors for data.

Nested dict, list and tuple of tensors, numbers, strings, bools and None; nothing else. There is no pickle here, so what
arrives can be wrong but never runs. Strides and aliases are lost: a probe that needs odd strides makes them inside.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Annotated, Any

import safetensors.torch
import torch

DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
# A probe's argument with an entry per rank: each rank is sent its own, and None for those of the others.
PerRank = Annotated[list, "an entry per rank"]
_LENGTH = struct.Struct("<Q")


class WireError(ValueError):
    """A value that may not cross, or bytes that are not a message; one line that says which."""


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts; a message beyond it is refused before anything is built from it."""

    bytes: int = 256 << 20
    count: int = 100_000  # values of every kind
    depth: int = 32


def pack(value: Any, limits: Limits = Limits()) -> bytes:
    """Bytes of a value. Raises WireError for a type, depth or size that may not cross."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _Packer(tensors, limits).pack(value, "value", 0)
    header = json.dumps(tree, separators=(",", ":")).encode("ascii")
    data = safetensors.torch.save(tensors) if tensors else b""
    message = _LENGTH.pack(len(header)) + header + data
    if len(message) > limits.bytes:
        raise WireError(f"value of {len(message)} bytes; at most {limits.bytes} may cross")
    return message


def unpack(message: bytes, limits: Limits = Limits()) -> Any:
    """The value of these bytes. Raises WireError for anything that `pack` would not have written."""
    if len(message) > limits.bytes:
        raise WireError(f"message of {len(message)} bytes; at most {limits.bytes} are accepted")
    if len(message) < _LENGTH.size:
        raise WireError("message cut short")
    (length,) = _LENGTH.unpack_from(message)
    header, data = message[_LENGTH.size : _LENGTH.size + length], message[_LENGTH.size + length :]
    if len(header) != length:
        raise WireError("message cut short")
    if sum(map(header.count, b"[{,")) > 4 * limits.count:  # cheap, and json.loads is not: a value is two or three
        raise WireError(f"more than {limits.count} values")
    try:
        tree = json.loads(header)
        tensors = safetensors.torch.load(data) if data else {}
    except Exception as error:  # whatever the parsers say of bytes that were made to hurt them
        raise WireError(f"not a message: {str(error)[:200]}") from None
    return _Unpacker(tensors, limits).unpack(tree, 0)


class _Packer:
    def __init__(self, tensors: dict[str, torch.Tensor], limits: Limits):
        self.tensors, self.limits, self.count, self.bytes = tensors, limits, 0, 0

    def pack(self, value: Any, where: str, depth: int) -> Any:
        self.count += 1
        if self.count > self.limits.count:
            raise WireError(f"more than {self.limits.count} values")
        if depth > self.limits.depth:
            raise WireError(f"{where[:80]}: nested deeper than {self.limits.depth}")
        kind = type(value)  # exact: a subclass may lie about itself
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list or kind is tuple:
            items = [self.pack(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
            return {"list" if kind is list else "tuple": items}
        if kind is dict:
            for key in value:
                if type(key) not in (str, int, bool, float, type(None)):
                    raise WireError(f"{where}: keys are strings or numbers, not {type(key).__name__}")
            return {"dict": [[k, self.pack(v, f"{where}[{k!r}]", depth + 1)] for k, v in value.items()]}
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return {"tensor": self.tensor(value, where)}
        raise WireError(
            f"{where}: a {kind.__module__}.{kind.__qualname__} may not cross; tensors, numbers, strings may"
        )

    def tensor(self, value: torch.Tensor, where: str) -> str:
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.device.type == "meta":
            raise WireError(f"{where}: a {value.layout} {value.dtype} tensor on {value.device} may not cross")
        self.bytes += value.numel() * value.element_size()
        if self.bytes > self.limits.bytes:  # before copying: an expanded tensor can claim petabytes
            raise WireError(f"{where}: tensors of more than {self.limits.bytes} bytes may not cross")
        name = str(len(self.tensors))
        # A copy always: safetensors refuses aliases, and a view would drag its whole storage along.
        self.tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name


class _Unpacker:
    def __init__(self, tensors: dict[str, torch.Tensor], limits: Limits):
        self.tensors, self.limits, self.count = tensors, limits, 0
        if bad := next((t.dtype for t in tensors.values() if t.dtype not in DTYPES), None):
            raise WireError(f"a {bad} tensor is not accepted")

    def unpack(self, tree: Any, depth: int) -> Any:
        self.count += 1
        if self.count > self.limits.count or depth > self.limits.depth:
            raise WireError(f"more than {self.limits.count} values, or nested deeper than {self.limits.depth}")
        if tree is None or type(tree) in (bool, int, float, str):
            return tree
        if type(tree) is dict and len(tree) == 1:
            ((tag, content),) = tree.items()
            if tag == "tensor" and type(content) is str and content in self.tensors:
                return self.tensors[content]
            if tag in ("list", "tuple") and type(content) is list:
                items = [self.unpack(v, depth + 1) for v in content]
                return items if tag == "list" else tuple(items)
            if tag == "dict" and type(content) is list and all(type(p) is list and len(p) == 2 for p in content):
                if any(type(k) not in (str, int, bool, float, type(None)) for k, _ in content):
                    raise WireError("a key that is neither string nor number")
                return {k: self.unpack(v, depth + 1) for k, v in content}
        raise WireError(f"not a message: a {type(tree).__name__} where a value should be")
