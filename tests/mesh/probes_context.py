"""Runs attention over a ring of ranks, each with its part of a given sequence."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lab.harness.callers import CallerTensors
from lab.harness.layouts import lay_out_all
from lab.measure.reads import AS_MEMORY, reads
from lab.ranks import gates


class First(TorchDispatchMode):
    """Asks for a gate of this name before the first matrix product inside, or at `mark` if there was none.

    all_products: the later products ask for gates too, with a number after the name.
    """

    def __init__(self, name: str, all_products: bool = False):
        super().__init__()
        self.name, self.all_products, self.products = name, all_products, 0

    def mark(self) -> None:
        if not self.products or self.all_products:
            gates.mark(f"{self.name} {self.products}" if self.products else self.name)
        self.products += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in flop_registry:
            self.mark()
        return func(*args, **(kwargs or {}))


PARTS = ("forward", "forward's first product", "backward", "backward's first product", "again")


def ring(impl, cases: list, members: list, all_products: bool = False) -> list:
    """Run ring attention per case. cases: q, k, v and do of the whole sequence (…, length, dim), and tensor layouts of
    a rank's part. members: the group's ranks; [] for the default group. Asks for the gates of PARTS, and if
    all_products for one before each product of forward."""
    options = {"group": dist.new_group(members)} if members else {}
    members, results = members or list(range(dist.get_world_size())), []
    for full, layouts in cases if dist.get_rank() in members else ():
        local = positions(full["q"].shape[-2], len(members), members.index(dist.get_rank()))
        operands = lay_out_all({name: full[name][..., local, :] for name in ("q", "k", "v", "do")}, layouts)
        q, k, v, do = (t.detach().requires_grad_(name != "do") for name, t in operands.items())
        caller = CallerTensors(q=q, k=k, v=v, do=do)
        gates.mark(PARTS[0])
        with reads() as read, FlopCounterMode(display=False) as counter, First(PARTS[1], all_products) as first:
            o = impl.mesh.context.ring_attention(q, k, v, **options)
            first.mark()
        gates.mark(PARTS[2])
        with First(PARTS[3]) as first:
            found = caller.gradients(
                [o], {"dq": q, "dk": k, "dv": v}, [do], again=lambda: (first.mark(), gates.mark(PARTS[4]))
            )
        results.append({
            "positions": local, "o": o.detach().clone(), **found, "flops": int(counter.get_total_flops()),
            "callers": caller.seen(), "unseen": sorted(read & AS_MEMORY),
        })  # fmt: skip
    return results


def positions(length: int, world: int, rank: int) -> list[int]:
    """Return a rank's positions in a sequence: a chunk from each end."""
    half = length // (2 * world)
    first, last = rank * half, (2 * world - 1 - rank) * half
    return [*range(first, first + half), *range(last, last + half)]


def large(impl, local: int, dim: int, seed: int, backward: bool) -> dict:
    """Draw large tensors on each rank; return the result, and the gradients if `backward`, summed over dim."""
    q, k, v, do = drawn(local, dim, seed, dist.get_rank())
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o = impl.mesh.context.ring_attention(q, k, v)
    if not backward:
        return {"o": o.detach().sum(-1)}
    o.backward(do)
    return {"o": o.detach().sum(-1), "dq": q.grad.sum(-1), "dk": k.grad.sum(-1), "dv": v.grad.sum(-1)}


def drawn(local: int, dim: int, seed: int, rank: int) -> tuple:
    """Draw q, k, v and do of a rank, each (local, dim)."""
    return torch.randn(4, local, dim, generator=torch.Generator().manual_seed(seed + rank)).clone().unbind()
