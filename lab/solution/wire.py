"""Carries values between a probe's process and its judge: JSON for structure, safetensors for data.

Supports nested dicts, lists and tuples of tensors, numbers, strings, bools and None. It does not use pickle, so
received data is never executed. Strides and aliases are lost; a probe that needs odd strides must make them itself.
"""

import json
import struct
from typing import Annotated, Any

import safetensors.torch
import torch

DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
# A probe's argument with an entry per rank: each rank receives its own entry, and None in place of the others.
PerRank = Annotated[list, "an entry per rank"]
_LENGTH = struct.Struct("<Q")


class WireError(ValueError):
    """A value cannot be sent, or bytes are not a message. The text is one line."""


# A receiver refuses a message beyond these limits before it builds any value.
BYTES = 256 << 20
COUNT = 100_000  # values of every kind
DEPTH = 32


def pack(value: Any) -> bytes:
    """Convert a value to bytes. Raises WireError for an unsupported type, and for too much depth or size."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _Packer(tensors).pack(value, "value", 0)
    header = json.dumps(tree, separators=(",", ":")).encode("ascii")
    data = safetensors.torch.save(tensors) if tensors else b""
    message = _LENGTH.pack(len(header)) + header + data
    if len(message) > BYTES:
        raise WireError(f"value of {len(message)} bytes; at most {BYTES} can be sent")
    return message


def unpack(message: bytes) -> Any:
    """Convert bytes to a value. Raises WireError for anything that `pack` would not have written."""
    if len(message) > BYTES:
        raise WireError(f"message of {len(message)} bytes; at most {BYTES} are accepted")
    if len(message) < _LENGTH.size:
        raise WireError("message cut short")
    (length,) = _LENGTH.unpack_from(message)
    header, data = message[_LENGTH.size : _LENGTH.size + length], message[_LENGTH.size + length :]
    if len(header) != length:
        raise WireError("message cut short")
    if sum(map(header.count, b"[{,")) > 4 * COUNT:  # a cheap check before json.loads: 2 or 3 of these per value
        raise WireError(f"more than {COUNT} values")
    try:
        tree = json.loads(header)
        tensors = safetensors.torch.load(data) if data else {}
    except Exception as error:  # malicious bytes can make the parsers raise anything
        raise WireError(f"not a message: {str(error)[:200]}") from None
    return _Unpacker(tensors).unpack(tree, 0)


class _Packer:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.count, self.bytes = tensors, 0, 0

    def pack(self, value: Any, where: str, depth: int) -> Any:
        self.count += 1
        if self.count > COUNT:
            raise WireError(f"more than {COUNT} values")
        if depth > DEPTH:
            raise WireError(f"{where[:80]}: nested deeper than {DEPTH}")
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
            f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be sent; tensors, numbers and strings can"
        )

    def tensor(self, value: torch.Tensor, where: str) -> str:
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.device.type == "meta":
            raise WireError(f"{where}: a {value.layout} {value.dtype} tensor on {value.device} cannot be sent")
        self.bytes += value.numel() * value.element_size()
        if self.bytes > BYTES:  # before copying: an expanded tensor can claim petabytes
            raise WireError(f"{where}: tensors of more than {BYTES} bytes cannot be sent")
        name = str(len(self.tensors))
        # Always copy: safetensors refuses aliases, and a view would include its whole storage.
        self.tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name


class _Unpacker:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.count = tensors, 0
        if bad := next((t.dtype for t in tensors.values() if t.dtype not in DTYPES), None):
            raise WireError(f"a {bad} tensor is not accepted")

    def unpack(self, tree: Any, depth: int) -> Any:
        self.count += 1
        if self.count > COUNT or depth > DEPTH:
            raise WireError(f"more than {COUNT} values, or nested deeper than {DEPTH}")
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
