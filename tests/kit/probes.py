"""Probes that test the harness. tests/kit/test_ranks.py writes the implementation."""

import contextlib
import json
import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist

from lab.cluster.schedule import Action
from lab.ranks.group import ledger


def environment(impl) -> dict[str, str]:
    return dict(os.environ)


def counter(impl) -> int:
    """The number of calls in this process, with this one; must be 1."""
    sys.asked = getattr(sys, "asked", 0) + 1
    return sys.asked


def receive_first(impl) -> None:
    """Deadlock: each of two ranks waits for the other to send."""
    dist.recv(torch.empty(4), src=1 - dist.get_rank())


def receive_from_itself(impl) -> None:
    """A rank sends to itself, which Gloo refuses with an unclear message."""
    dist.irecv(torch.zeros(1), src=dist.get_rank()).wait()


def send_to_who_is_gone(impl) -> None:
    """Rank 1's first message waits for rank 0, which never connects."""
    if dist.get_rank() == 1:
        dist.send(torch.ones(4), dst=0)


def items_of(impl) -> list:
    return list(impl.ddp.naive.step().items())


def broadcast_from(impl, rank: int) -> None:
    dist.broadcast(torch.ones(1), group_src=rank)


def wait_twice(impl) -> float | None:
    """Rank 1 receives a message, and waits for it twice."""
    message = torch.ones(4)
    if dist.get_rank() == 0:
        dist.send(message, dst=1)
        return None
    work = dist.irecv(message.zero_(), src=0)
    work.wait()
    work.wait()
    return message[0].item()


def rank_and_world(impl) -> list[int]:
    return [dist.get_rank(), dist.get_world_size()]


def shout(data: bytes) -> None:
    """Write to all open descriptors of this process, and end it."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, data)
    os._exit(0)


def misbehave(impl, how: str):
    """End this process in the given way."""
    print("said before the end")
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(0)
    if how == "system-exit":
        sys.exit("enough")
    if how == "spin":
        while True:
            pass
    if how == "sleep":
        time.sleep(600)
    if how == "subclass":
        return type("Tensor", (torch.Tensor,), {})(torch.ones(2))
    if how == "print":
        print("x" * 10_000_000)
    if how == "garbage":
        shout(b"\x01" * 4096)
    return "fine"


def work(impl, core: int, seconds: float) -> float:
    """Compute for so many seconds of CPU time. Return the elapsed seconds."""
    os.sched_setaffinity(0, {core})
    start = time.monotonic()
    while time.thread_time() < seconds:
        pass
    return time.monotonic() - start


def print_text(impl, what: str):
    """Print the text; if it is empty, print this rank's number."""
    print(what or f"this is {dist.get_rank()}")


def warn(impl, what: str):
    """Issue a warning, as a library does."""
    warnings.warn(what, stacklevel=1)


def call(impl):
    """Call the implementation's function."""
    return impl.ddp.naive.step()


def mismatch(impl):
    """Rank 0 broadcasts, the others reduce."""
    x = torch.ones(1024)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)


def make_groups(impl, how: str):
    """Use messages, splits or groups wrongly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if how == "not contiguous":
        works = dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[rank], torch.ones(3, 2).T, 1 - rank)])
        works[0].wait()
    if how == "other splits":
        dist.all_to_all_single(torch.empty(2), torch.ones(2), [2], [2])
    if how == "wrong source":
        odd = [dist.new_group(list(range(first, world, 2))) for first in range(2)][1]
        if rank % 2:
            dist.broadcast(torch.ones(2), src=0, group=odd)


def local_groups(impl) -> float:
    """The sum over a group that only its members create."""
    rank = dist.get_rank()
    group, x = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True), torch.ones(())
    dist.all_reduce(x, group=group)
    return float(x)


def futures(impl) -> dict[str, list]:
    """Wait for an all-reduce in every way that a future offers. Return results, and whether the ledger has times."""
    ways = {
        "wait": lambda f: f.wait(),
        "then": lambda f: f.then(lambda done: done.value()).then(lambda done: done.value()).wait(),
        "wait_all": lambda f: torch.futures.wait_all([f]),
        "collect_all": lambda f: torch.futures.collect_all([f.then(lambda done: done.value())]).wait(),
    }
    results = {}
    for name, wait in ways.items():
        x = torch.ones(3)
        future = dist.all_reduce(x, async_op=True).get_future()
        row = ledger.rows[-1]
        before = row.waited_s
        wait(future)
        results[name] = [x.tolist(), before, row.issued_s < row.waited_s]
    return results


def litter(impl) -> list[str]:
    """List files in the scratch folders, then leave some there for the next probe to find."""
    found = os.listdir("/tmp") + os.listdir("/dev/shm")
    os.makedirs("/tmp/mine/closed")
    for path in ("/tmp/hoard", "/dev/shm/hoard", "/tmp/mine/closed/hoard"):
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
    os.chmod("/tmp/mine/closed", 0)
    return found


def forge_reply(impl, reason: str, knowing: bool = True) -> None:
    """Write a forged answer with this reason to the reply pipe. knowing: whether the secret is the right one."""
    frame = sys._getframe()
    while "secret" not in frame.f_locals:
        frame = frame.f_back
    secret = frame.f_locals["secret"] if knowing else "?"
    error = {"reason": reason, "type": "", "text": "not me", "frames": []}
    header = json.dumps({"ok": False, "error": error, "secret": secret, "blobs": [0]}).encode()
    shout(len(header).to_bytes(8, "little") + header)


class Scale(torch.nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.factor


def pipelined(impl, schedule, micro_batches, elements):
    """The mean loss of micro-batches of ones. Rank 0 doubles them, rank 1 triples them, and so on."""
    rank, x = dist.get_rank(), torch.ones(elements)
    actions = [Action(*action) for action in schedule[rank]]
    chunks, inputs = [Scale(2.0 + rank)], [x] * micro_batches
    loss = impl.mesh.execute.execute(actions, chunks, inputs, inputs, lambda output, _: output.mean(), x)
    return None if loss is None else float(loss)
