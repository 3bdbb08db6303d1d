"""A rank's only connection: a socket to the switch. A background thread reads the answers."""

import ctypes
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import frames

Callback = Callable[[dict[str, Any]], None]


class SwitchConnection:
    """A rank's socket to the switch: sends frames, and receives answers."""

    def __init__(self, fd: int):
        self._socket = socket.socket(fileno=fd)
        self._answers = self._socket.makefile("rb")
        self._asked: dict[int, tuple[Sequence[torch.Tensor], Callback]] = {}  # pending answers, by operation number
        self._sending = threading.Lock()
        self._last_gate_number = 0
        threading.Thread(target=self._listen, daemon=True, name="switch").start()

    def tell(self, header: dict[str, Any], payload: Sequence[torch.Tensor] = ()) -> None:
        """Send a frame. payload: contiguous tensors."""
        memory = [memory_of(t) for t in payload if t.numel()]
        parts = frames.joined([frames.pack(header, sum(map(len, memory))), *memory])
        with self._sending:
            for part in parts:
                self._socket.sendall(part)

    def on_answer(self, number: int, tensors: Sequence[torch.Tensor], callback: Callback) -> None:
        """Write the answer to operation `number` into these tensors, one after the other, then call `callback`."""
        self._asked[number] = tensors, callback

    def gate(self, name: str) -> torch.Tensor:
        """Return the numbers of a gate, requested from the switch; 1.0 if the switch has no gate of this name."""
        self._last_gate_number -= 1  # negative numbers, because operations count upwards from 0
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.on_answer(number := self._last_gate_number, [], answers.put)
        self.tell({"do": "gate", "name": name, "number": number})
        answer = answers.get()
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return torch.tensor(answer["numbers"])

    def _listen(self) -> None:
        try:
            while True:
                self._handle(*frames.receive(self._answers))
        except (EOFError, OSError):
            while self._asked:
                self._asked.popitem()[1][1]({"error": "Connection closed by peer: the switch is gone"})

    def _handle(self, header: dict[str, Any], size: int) -> None:
        """Handle one answer. In `_listen` itself, local variables would keep the tensors alive."""
        tensors, on_answer = self._asked.pop(header["number"])
        for tensor in tensors if size else ():
            self._fill(tensor)
        on_answer(header)

    def _fill(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        if tensor.is_contiguous():
            frames.read_into(self._answers, memory_of(tensor))
        else:
            buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            frames.read_into(self._answers, memory_of(buffer))
            with torch.no_grad():
                tensor.copy_(buffer)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, read by address, because instruments would count torch calls."""
    with torch._C.DisableTorchFunction():
        address = tensor.data_ptr()
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(address)).cast("B")
