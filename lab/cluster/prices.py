"""Seconds of an event: of kernels by a roofline with tiles and waves, of collectives by the nodes of their ranks.

No constant is fitted to a training run. lab/cluster/hardware.toml gives their sources, and names the calibrated one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from .events import Collective, Compute, Recv, Send
from .hardware import Cluster, Device, Wire

FUSED = "fused attention"  # label of a kernel that runs at attention_flops
_TILES = ((256, 128), (128, 256), (128, 128))


def compute_s(event: Compute, device: Device) -> float:
    """Return the seconds of a kernel: arithmetic or memory traffic, whichever takes longer, and kernel_s.

    A matrix product runs in whole waves of whole tiles over all SMs (`matmul_s`). Fused attention runs at its measured
    rate. All other kernels cost only their traffic. Rates are those that kernels reach in a layer (`layer_share`).
    """
    traffic_s = event.bytes / (device.hbm_bytes_per_s * device.hbm_share)
    if event.label == FUSED:
        backward = event.phase == "backward"  # this rate includes recomputing the scores: 2.5 forwards, not 2
        arithmetic_s = event.flops * (1.25 if backward else 1) / device.attention_flops[backward]
    elif event.shape is not None:
        arithmetic_s = matmul_s(event.shape, event.batch, device)
    else:
        arithmetic_s = 0.0
    return max(arithmetic_s, traffic_s) / device.layer_share + device.kernel_s


@lru_cache(maxsize=65536)
def matmul_s(shape: tuple[int, int, int], batch: int, device: Device) -> float:
    """Return the seconds of `batch` products (m, k) @ (k, n): waves times seconds per tile, with the best tile.

    The rate of an SM is set so that a product of matmul_shape runs at matmul_flops. Example: an A100 has 108 SMs. A
    product of 4096 × 4096 by 4096 × 4096 has 512 tiles of 256 × 128, that is 4.74 waves, rounded up to 5, so the SMs
    are busy for 94.8 % of the time. With matmul_shape they are busy for 98.8 %, so this product runs at 96.0 % of
    matmul_flops. Source: NVIDIA, Matrix Multiplication Background User's Guide, chapter 3.
    """
    m, n, k = device.matmul_shape
    best_s = 2 * m * n * k / device.matmul_flops - device.kernel_s
    return _waves(shape, batch, device) * best_s / _waves(device.matmul_shape, 1, device)


def _waves(shape: tuple[int, int, int], batch: int, device: Device) -> float:
    """Multiply-adds of the busiest SM, with the best tile size."""
    m, n, k = shape
    return min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / device.sms) * rows * columns * k
        for rows, columns in _TILES
    )


def collective_s(event: Collective, cluster: Cluster) -> float:
    """Return the seconds of a collective, by the fastest of ring, tree and hierarchy over the nodes of its ranks."""
    nodes, each, world = _layout(event.ranks, cluster.node)
    return group_s(event.op, event.bytes, nodes, each, cluster, world)


@lru_cache(maxsize=65536)
def group_s(op: str, bytes: float, nodes: int, each: int, cluster: Cluster, world: int = 0) -> float:
    """Return the seconds of `op` over `nodes` nodes; `bytes` is the payload of `ring_cost`.

    each: ranks of the group on the node that has most of them. world: number of ranks; 0: `each` on every node.

    Within a node: a ring on the node's links. Across nodes, each rank has its own network card:

    - ring: through all ranks, at the rate of a node's link or of all cards of a node's ranks, whichever is lower;
    - tree, only for all_reduce: up and down ⌈log₂ W⌉ links, pipelined, so the tensor passes the same link twice;
    - all_to_all: the card sends parts for other nodes, while the node's links carry the other parts;
    - hierarchy: within each node, then between nodes with 1/`each` of the tensor per card, then within each node again.

    Source of the tree: NCCL's double binary trees (Sanders et al. 2009); of the hierarchy: Mikami et al. 2018.
    """
    world = world or nodes * each
    if world == 1:
        return 0.0
    inside, between = cluster.inside, cluster.between
    if nodes == 1:
        return inside.base_s + inside.cost_s(op, bytes, world)
    if op == "all_to_all":  # parts for other nodes leave by the card, and at the same time the others by the links
        remote, local = bytes * (world - each) / world, bytes * (each - 1) / world
        sent_s = max(remote / between.bytes_per_s, local / inside.bytes_per_s)
        return between.base_s + (world - each) * between.alpha_s + (each - 1) * inside.alpha_s + sent_s
    if op not in ("all_reduce", "reduce_scatter", "all_gather"):
        return between.base_s + between.cost_s(op, bytes, world)
    rate = min(inside.bytes_per_s, each * between.bytes_per_s) if each > 1 else between.bytes_per_s
    steps = (2 if op == "all_reduce" else 1) * (world - 1)
    crossing = steps * nodes // world  # number of these steps that wait for a card
    full = bytes if op == "all_reduce" else bytes * world
    ring = crossing * between.alpha_s + (steps - crossing) * inside.alpha_s + steps * full / world / rate
    times = [ring, _hierarchy(op, bytes, nodes, each, inside, between)]
    if op == "all_reduce":
        hops = 2 * ((each - 1) * inside.alpha_s + (nodes - 1).bit_length() * between.alpha_s)
        times.append(hops + 2 * bytes / rate)
    return between.base_s + min(times)


def _hierarchy(op: str, bytes: float, nodes: int, each: int, inside: Wire, between: Wire) -> float:
    if op == "all_reduce":
        part = bytes / each
        within = inside.cost_s("reduce_scatter", part, each) + inside.cost_s("all_gather", part, each)
        return within + between.cost_s("all_reduce", part, nodes)
    # The payload is one rank's part. Between nodes, each card carries its rank's part. Within a node, the links carry
    # the parts of all nodes.
    return between.cost_s(op, bytes, nodes) + inside.cost_s(op, bytes * nodes, each)


def message_s(event: Send | Recv, rank: int, cluster: Cluster) -> float:
    """Return the seconds of a message between `rank` and the event's peer."""
    same_node = rank // cluster.node == event.peer // cluster.node
    wire = cluster.inside if same_node else cluster.between
    return wire.alpha_s + event.bytes / wire.bytes_per_s


@lru_cache(maxsize=65536)
def _layout(ranks: Sequence[int], node: int) -> tuple[int, int, int]:
    """Return (number of nodes, largest number of these ranks on one node, number of ranks)."""
    counts = Counter(rank // node for rank in ranks)
    return len(counts), max(counts.values()), len(ranks)
