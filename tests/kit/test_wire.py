"""The wire between probe and judge carries exact values or gives one clear error, and never runs code."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.solution import wire
from lab.solution.wire import WireError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=4) | st.lists(v, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=4), v),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_values_arrive_as_they_left(value):
    got = wire.unpack(wire.pack(value))
    assert got == value
    assert repr(got) == repr(value)  # True is not 1, 1 is not 1.0


@pytest.mark.parametrize("dtype", sorted(wire.DTYPES, key=str), ids=str)
def test_tensors_arrive_to_the_bit(dtype):
    for t in (torch.tensor(1).to(dtype), torch.empty(0, 3, dtype=dtype), torch.arange(6).view(2, 3).T.to(dtype)):
        got = wire.unpack(wire.pack({"t": (t, t[..., :1] if t.ndim else t)}))["t"][0]
        assert got.dtype == dtype
        assert torch.equal(got, t)


def test_not_a_number_and_infinities_arrive():
    t = torch.tensor([float("nan"), float("inf"), -0.0])
    got = wire.unpack(wire.pack([t, float("nan"), float("-inf")]))
    assert got[0].view(torch.int32).tolist() == t.view(torch.int32).tolist()
    assert got[1] != got[1]
    assert got[2] == float("-inf")


def test_aliases_and_gradients_are_left_behind():
    t = torch.ones(3, requires_grad=True)
    a, b = wire.unpack(wire.pack([t, t]))
    assert not a.requires_grad
    assert a.data_ptr() != b.data_ptr()


class Rows(list):
    pass


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value",
    [
        Rows([1]),
        type('D', (dict,), {})(), type('S', (str,), {})('x'),
        Liar(1), type("T", (torch.Tensor,), {})(torch.ones(1)), object(), {1, 2}, b"bytes", 1j, {(1, 2): 3},
        torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta"), torch.eye(2).to_sparse(),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_wire_refuses_unsupported_types(value):
    with pytest.raises(WireError, match=r"cannot be sent|keys are"):
        wire.pack([value])


def test_wire_limits_apply_before_values_are_built(monkeypatch):
    nested = []
    for _ in range(40):
        nested = [nested]
    with pytest.raises(WireError, match="deeper"):
        wire.pack(nested)
    with pytest.raises(WireError, match="bytes cannot be sent"):
        wire.pack(torch.zeros(1).expand(1 << 50))  # its size claims to be four petabytes
    large, many = wire.pack(torch.zeros(1000)), wire.pack([0] * 11)
    monkeypatch.setattr(wire, "COUNT", 10)
    with pytest.raises(WireError, match="more than"):
        wire.pack([0] * 11)
    with pytest.raises(WireError, match="more than"):
        wire.unpack(many)
    header = b"[" + b"[]," * 50 + b"[]]"
    with pytest.raises(WireError, match="more than 10 values"):  # before the parser creates them
        wire.unpack(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(wire, "BYTES", 100)
    with pytest.raises(WireError, match="bytes"):
        wire.unpack(large)


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_flipped_byte_raises_only_wire_error(position, flip):
    message = bytearray(wire.pack({"a": [1, "x"], "t": torch.arange(5)}))
    message[position % len(message)] ^= flip
    with contextlib.suppress(WireError):
        wire.unpack(bytes(message))
