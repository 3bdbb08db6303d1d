"""torch's operations of process groups, on the kit's own backend: a table of (operation on a rank, oracle).

An oracle gets the inputs of all ranks, and a rank. It runs in one process, without groups.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lab.harness.raising import raised

WORLD = 4
PAIRS = [[0, 2], [1, 3]]  # groups of two ranks that are not neighbours
UNEVEN = [[(r + 2 * s) % 3 for r in range(WORLD)] for s in range(WORLD)]  # [s][r]: rows from s to r, sometimes 0


def rank_input(rank: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor (rows, 2) of small whole numbers, exact in every dtype; for bool, some are True."""
    x = (torch.arange(2 * rows).view(rows, 2) * (rank + 1)) % 3
    return ((x > 0) if dtype is torch.bool else x + 1).to(dtype)


def cases(impl: Any, names: list[str], dtypes: list[str]) -> dict[str, Any]:
    """This rank's results of these rows of the table, by dtype; as bytes if the wire does not support the dtype."""
    inputs = {d: rank_input(dist.get_rank(), dtype=getattr(torch, d)) for d in dtypes}
    return {f"{name}, {d}": wire_value(CASES[name][0](x)) for d, x in inputs.items() for name in names}


def wire_value(value: Any) -> Any:
    """View complex and 8-bit tensors as bytes."""
    if isinstance(value, Tensor) and (value.is_complex() or "float8" in str(value.dtype)):
        return value.contiguous().view(torch.uint8)
    return [*map(wire_value, value)] if isinstance(value, list) else value


def reduced(impl: Any, how: str, dtypes: list[str]) -> dict[str, list[Tensor]]:
    """Results of all_reduce, reduce to the last rank, and reduce_scatter."""
    op, results = dist._make_nccl_premul_sum(2.0) if how == "PREMUL_SUM" else getattr(dist.ReduceOp, how), {}
    for dtype in dtypes:
        x = rank_input(dist.get_rank(), dtype=getattr(torch, dtype))
        every, last, share = x.clone(), x.clone(), _share(x)
        dist.all_reduce(every, op)
        dist.reduce(last, WORLD - 1, op)
        dist.reduce_scatter_tensor(share, x, op)
        results[dtype] = wire_value([every, last, share])
    return results


def impossible(impl: Any) -> str:
    """The error of a reduction that torch does not support for this dtype."""
    return raised(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), text=True)


def _wide(x: Tensor) -> Tensor:
    return x.new_zeros(WORLD * len(x), *x.shape[1:])


def _share(x: Tensor) -> Tensor:
    return x.new_zeros(len(x) // WORLD, *x.shape[1:])


def _gathered(x: Tensor) -> list[Tensor]:
    parts, flat = [torch.empty(2, len(x)).to(x.dtype).T for _ in range(WORLD)], _wide(x)
    dist.all_gather(parts, x)  # the parts are not contiguous
    dist.all_gather_into_tensor(flat, x, async_op=True).wait()
    return [torch.cat(parts), flat]


def _reduce_scattered(x: Tensor) -> list[Tensor]:
    of_list, flat = _share(x), _share(x)
    dist.reduce_scatter(of_list, list(x.chunk(WORLD)))
    dist.reduce_scatter_tensor(flat, x, async_op=True).wait()
    return [of_list, flat]


def _from_one(x: Tensor) -> list[Tensor]:
    every, part, at_root = x.clone(), _share(x), dist.get_rank() == 3
    dist.broadcast(every, 2)
    dist.scatter(part, list(x.chunk(WORLD)) if at_root else None, src=3)
    return [every, part]


def _to_one(x: Tensor) -> list[Tensor]:
    summed, parts = x.clone(), [torch.empty_like(x) for _ in range(WORLD)] if dist.get_rank() == 3 else None
    dist.reduce(summed, 3)
    dist.gather(x, parts, dst=3)
    dist.barrier()
    return [summed, *(parts or [])]


def _uneven(x: Tensor) -> list[Tensor]:
    rank = dist.get_rank()
    splits = [[row[rank] for row in UNEVEN], UNEVEN[rank]]  # rows to receive, rows to send
    x = x[: sum(splits[1])].clone()
    out, parts = x.new_zeros(sum(splits[0]), 2), [x.new_zeros(n, 2) for n in splits[0]]
    dist.all_to_all_single(out, x, *splits)
    dist.all_to_all(parts, list(x.split(splits[1])))
    same = functional.all_to_all_single(x, *splits, dist.group.WORLD)
    return [out, torch.cat(parts), functional.wait_tensor(same)]


def _coalesced(x: Tensor) -> list[Tensor]:
    sums, wide, shares = [x.clone(), x[:3].clone()], [_wide(x), _wide(x[:3])], [_share(x), _share(x)]
    with dist._coalescing_manager():
        for t in sums:
            dist.all_reduce(t)
    with dist._coalescing_manager():
        for out, t in zip(wide, (x, x[:3]), strict=True):
            dist.all_gather_into_tensor(out, t)
    with dist._coalescing_manager(async_ops=True) as works:
        for out in shares:
            dist.reduce_scatter_tensor(out, x)
    works.wait()
    return [*sums, *wide, *shares]


def _functional(x: Tensor) -> list[Tensor]:
    world = dist.group.WORLD
    coalesced = [
        *functional.all_reduce_coalesced([x, x[:3]], "sum", world),
        *functional.all_gather_into_tensor_coalesced([x, x[:3].clone()], world),
        *functional.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], world),
    ]
    single = [
        functional.all_reduce(x, "max", world), functional.all_gather_tensor(x, 1, world),
        functional.reduce_scatter_tensor(x, "sum", 0, world), functional.broadcast(x, 1, world),
        functional.permute_tensor(x.flatten(), [1, 2, 3, 0], world),
    ]  # fmt: skip
    return [t.clone() for t in (*coalesced, *single)]


def _subgroups(x: Tensor) -> list[Tensor]:
    group = [dist.new_group(ranks) for ranks in PAIRS][dist.get_rank() % 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    sums = [x.clone() for _ in range(4)]
    dist.all_reduce(sums[0], group=group)
    dist.broadcast(sums[1], group_src=1, group=group)
    dist.all_reduce(sums[2], group=mesh.get_group("columns"))
    dist.all_reduce(sums[3], group=mesh._flatten().get_group())
    return sums


def _messages(x: Tensor) -> list[Tensor]:
    """Send right with two tags, received in reverse order; send to rank 0, received from any; send left in a batch."""
    rank, got = dist.get_rank(), [torch.zeros_like(x) for _ in range(3)]
    right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
    works = [dist.isend(x, right, tag=1), dist.isend(2 * x, right, tag=2)]
    works += [dist.irecv(got[0], left, tag=2), dist.irecv(got[1], left, tag=1)]
    works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, got[2], right), dist.P2POp(dist.isend, x, left)])
    for work in works:
        work.wait()
    if rank:
        dist.send(x, 0)
        return got
    anyone = torch.zeros(WORLD, *x.shape)
    for _ in range(WORLD - 1):
        y = torch.zeros_like(x)
        anyone[dist.recv(y)] = y
    return [*got, anyone]


def _chunk(x: Tensor, r: int) -> Tensor:
    return x.chunk(WORLD)[r]


def _want_coalesced(x: list[Tensor], r: int) -> list[Tensor]:
    return [sum(x), sum(x)[:3], torch.cat(x), torch.cat([t[:3] for t in x]), _chunk(sum(x), r), _chunk(sum(x), r)]


def _want_messages(x: list[Tensor], r: int) -> list[Tensor]:
    left, right = x[r - 1], x[(r + 1) % WORLD]
    return [2 * left, left, right, *([torch.stack([0 * x[0], *x[1:]])] if r == 0 else [])]


CASES: dict[str, tuple[Callable, Callable]] = {  # (operation on a rank's tensor, oracle of all ranks' tensors)
    "all_gather": (_gathered, lambda x, r: 2 * [torch.cat(x)]),
    "reduce_scatter": (_reduce_scattered, lambda x, r: 2 * [_chunk(sum(x), r)]),
    "from one": (_from_one, lambda x, r: [x[2], _chunk(x[3], r)]),
    "to one": (_to_one, lambda x, r: [sum(x), *x] if r == 3 else [x[r]]),
    "uneven all_to_all": (
        _uneven, lambda x, r: 3 * [torch.cat([x[s][: sum(UNEVEN[s])].split(UNEVEN[s])[r] for s in range(WORLD)])],
    ),
    "coalesced": (_coalesced, _want_coalesced),
    "functional": (_functional, lambda x, r: [
        *_want_coalesced(x, r), torch.stack(x).amax(0), torch.cat(x, 1), _chunk(sum(x), r), x[1], x[r - 1].flatten(),
    ]),
    "subgroups": (_subgroups, lambda x, r: [
        x[r % 2] + x[r % 2 + 2], x[r % 2 + 2], x[r // 2 * 2] + x[r // 2 * 2 + 1], sum(x),
    ]),
    "messages": (_messages, _want_messages),
}  # fmt: skip
