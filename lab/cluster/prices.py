"""Seconds of an event: kernels by a roofline with tiles and waves, collectives by where the ranks are.

No constant is fitted to a training run: lab/cluster/hardware.toml has their sources, and says which one is calibrated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from .events import Collective, Compute, Recv, Send
from .hardware import Cluster, Device, Wire

FUSED = "fused attention"  # the label of a kernel that is priced by attention_flops
_TILES = ((256, 128), (128, 256), (128, 128))


def compute_s(event: Compute, device: Device) -> float:
    """The longer of its arithmetic and its traffic in device memory, as fast as in a layer, and what any kernel takes.

    A product's arithmetic is whole waves of whole tiles over all SMs (`matmul_s`); that of fused attention is at its
    measured rate; of the rest only traffic counts.
    """
    traffic_s = event.bytes / (device.hbm_bytes_per_s * device.hbm_share)
    if event.label == FUSED:
        backward = event.phase == "backward"  # its rate counts the scores that it computes again: 2.5 forwards, not 2
        arithmetic_s = event.flops * (1.25 if backward else 1) / device.attention_flops[backward]
    elif event.shape is not None:
        arithmetic_s = matmul_s(event.shape, event.batch, device)
    else:
        arithmetic_s = 0.0
    return max(arithmetic_s, traffic_s) / device.layer_share + device.kernel_s


@lru_cache(maxsize=65536)
def matmul_s(shape: tuple[int, int, int], batch: int, device: Device) -> float:
    """Arithmetic of `batch` products (m, k) @ (k, n): waves · the time of a tile, with the best of three tile sizes.

    An SM's rate is that with which matmul_flops comes out at matmul_shape. An A100 has 108 SMs: 4096² · 4096 makes 512
    tiles of 256 × 128, 4.74 waves and so 5, which keeps its SMs busy for 94.8 % of the time. matmul_shape does for
    98.8 %, and so 4096³ comes out at 96.0 % of matmul_flops. Source: NVIDIA, Matrix Multiplication Background User's
    Guide, chapter 3.
    """
    m, n, k = device.matmul_shape
    best_s = 2 * m * n * k / device.matmul_flops - device.kernel_s
    return _waves(shape, batch, device) * best_s / _waves(device.matmul_shape, 1, device)


def _waves(shape: tuple[int, int, int], batch: int, device: Device) -> float:
    """The least work of an SM over all tile sizes: multiply-adds."""
    m, n, k = shape
    return min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / device.sms) * rows * columns * k
        for rows, columns in _TILES
    )


def collective_s(event: Collective, cluster: Cluster) -> float:
    """The faster of ring, tree and hierarchy for a group whose ranks lie on nodes as they do."""
    nodes, each, world = _lie(event.ranks, cluster.node)
    return group_s(event.op, event.bytes, nodes, each, cluster, world)


@lru_cache(maxsize=65536)
def group_s(op: str, bytes: float, nodes: int, each: int, cluster: Cluster, world: int = 0) -> float:
    """Seconds of `op` over `nodes` nodes with `each` of the group's ranks on the fullest; `bytes` as in `ring_cost`.

    world: ranks in all, 0: as many on each node.

    Within a node: a ring on the links inside. Across nodes, each rank has a card of its own:

    - ring: through all ranks, as fast as the slower of a link inside and all cards of the node's ranks together;
    - tree, of an all_reduce: up and down ⌈log₂ W⌉ links, pipelined: the tensor twice over the same;
    - hierarchy: within each node, then between the nodes with an `each`-th of the tensor a card, then within again.

    Source of the last two: NCCL's double binary trees (Sanders et al. 2009); Mikami et al. 2018 for 2D all-reduce.
    """
    world = world or nodes * each
    if world == 1:
        return 0.0
    inside, between = cluster.inside, cluster.between
    if nodes == 1:
        return inside.base_s + inside.cost_s(op, bytes, world)
    if op not in ("all_reduce", "reduce_scatter", "all_gather"):
        return between.base_s + between.cost_s(op, bytes, world)
    through = min(inside.bytes_per_s, each * between.bytes_per_s) if each > 1 else between.bytes_per_s
    steps = (2 if op == "all_reduce" else 1) * (world - 1)
    crossing = steps * nodes // world  # of these steps so many wait for a card
    whole = bytes if op == "all_reduce" else bytes * world
    ring = crossing * between.alpha_s + (steps - crossing) * inside.alpha_s + steps * whole / world / through
    ways = [ring, _hierarchy(op, bytes, nodes, each, inside, between)]
    if op == "all_reduce":
        hops = 2 * ((each - 1) * inside.alpha_s + (nodes - 1).bit_length() * between.alpha_s)
        ways.append(hops + 2 * bytes / through)
    return between.base_s + min(ways)


def _hierarchy(op: str, bytes: float, nodes: int, each: int, inside: Wire, between: Wire) -> float:
    if op == "all_reduce":
        part = bytes / each
        within = inside.cost_s("reduce_scatter", part, each) + inside.cost_s("all_gather", part, each)
        return within + between.cost_s("all_reduce", part, nodes)
    # The payload is one rank's part: between nodes each card carries its own, within a node all nodes' parts.
    return between.cost_s(op, bytes, nodes) + inside.cost_s(op, bytes * nodes, each)


def message_s(event: Send | Recv, rank: int, cluster: Cluster) -> float:
    """A message between `rank` and the event's peer."""
    near = rank // cluster.node == event.peer // cluster.node
    wire = cluster.inside if near else cluster.between
    return wire.alpha_s + event.bytes / wire.bytes_per_s


@lru_cache(maxsize=65536)
def _lie(ranks: Sequence[int], node: int) -> tuple[int, int, int]:
    """(nodes, ranks on the fullest of them, ranks)."""
    on = Counter(rank // node for rank in ranks)
    return len(on), max(on.values()), len(ranks)
