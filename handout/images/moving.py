"""The numbers of the interactive figures, one function each. `draw.py` writes them to handout/site/moving/*.json.

Each function has the name of its picture. The numbers are stored as files, since a student's archive has no reference.
"""

import math
from itertools import product
from typing import Any

import torch

from lab.cluster.costs import ring_cost, sent_bytes
from lab.cluster.hardware import cluster
from reference.ddp.accounting import Link, accounting
from reference.flash_attention.online_softmax import online_softmax
from reference.mesh.mesh import AXES, Mesh

from . import ddp, mesh, zero
from . import journey as trip

MB = 1e6
SCORES = (  # rows: eight queries; columns: eight keys
    (1, 0, 2, -1, 3, 1, 0, 2), (0, 2, 1, 1, -1, 4, 0, 1), (2, 1, 0, 3, 1, 0, 2, -1), (-1, 0, 1, 2, 0, 5, 1, 0),
    (1, 1, 3, 0, 2, -1, 0, 4), (0, 3, -1, 1, 0, 2, 1, 1), (2, 0, 1, -1, 4, 1, 3, 0), (1, 2, 0, 1, 0, 3, -1, 2),
)  # fmt: skip
VALUES = (4, -2, 1, 3, 0, 5, -1, 2)
MODELS = {"GPT-2, 124 M": 124e6, "1.3 B": 1.3e9, "7.5 B": 7.5e9, "13 B": 13e9, "70 B": 70e9, "405 B": 405e9}
GPU_BYTES = 80e9
CLUSTERS = ("dgx-a100", "dgx-h100", "hgx-h200", "hgx-b200")


def ring() -> dict[str, Any]:
    """By collective and ranks: each rank's numbers after each step (None: absent), and those that just arrived."""
    found: dict[str, Any] = {}
    for world in range(2, 7):
        states = ddp.ring_states(world)
        sums, half = states[-1][0][0], world - 1
        gathered = [
            ([[n if n == total else None for n, total in zip(row, sums, strict=True)] for row in rows], received)
            for rows, received in states[half:]
        ]
        gathered[0] = (gathered[0][0], [])
        by_op = {"all_reduce": states, "reduce_scatter": states[: half + 1], "all_gather": gathered}
        for op, steps in by_op.items():
            payload = MB if op == "all_reduce" else MB / world
            found[f"{op} {world}"] = {
                "reduces": {"all_reduce": half, "reduce_scatter": half, "all_gather": 0}[op],
                "states": [{"rows": rows, "came": received} for rows, received in steps],
                "ms": 1e3 * ring_cost(op, payload, world, ddp.LINK.alpha_s, 1 / ddp.LINK.bytes_per_s),
                "sent_kb": sent_bytes(op, payload, world) / 1e3,
            }
    return found


def tiles() -> dict[str, Any]:
    """By tile side and mask: each visited tile, with m, l and acc of its rows afterwards."""
    found: dict[str, Any] = {"scores": SCORES, "values": VALUES}
    values = torch.tensor(VALUES, dtype=torch.float64)
    for side, causal in product((1, 2, 4), (False, True)):
        scores = torch.tensor(SCORES, dtype=torch.float32)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
        visits = []
        for i in range(0, len(SCORES), side):
            for j in range(0, i + side if causal else len(SCORES), side):
                seen = scores[i : i + side, : j + side]  # (rows, keys so far)
                row = online_softmax(seen.split(side, dim=-1))
                acc = torch.exp(seen.double() - row.maximum.double()[:, None]) @ values[: j + side]  # (rows,)
                visits.append({"i": i, "j": j, "rows": _rounded(row.maximum, row.normaliser, acc)})
        found[f"{side} {'causal' if causal else 'full'}"] = visits
    return found


def _rounded(*columns: torch.Tensor) -> list[list[float]]:
    """Round vectors, and return them as the columns of a table."""
    return [[round(n, 4) for n in row] for row in torch.stack([c.double() for c in columns], dim=1).tolist()]


def buckets() -> dict[str, Any]:
    """By latency in µs, bandwidth in GB/s and gradients per bucket: the messages of the worked example."""
    layers, backward_ms = ddp.LAYERS, 1e3 * ddp.LAYERS_BACKWARD_S
    found: dict[str, Any] = {"layers": len(layers), "backward_ms": backward_ms, "bucket_mb": layers[0] / MB}
    variants = product((10, 30, 100, 300, 1000), (0.25, 0.5, 1, 2, 4, 8), range(1, len(layers) + 1))
    for alpha_us, gb_per_s, per_bucket in variants:
        link, limit = Link(alpha_us * 1e-6, gb_per_s * 1e9), per_bucket * layers[0]
        bucketed = {"variant": "bucketed", "backward_s": ddp.LAYERS_BACKWARD_S, "bucket_bytes": limit}
        sends = ddp.bucket_sends(limit, link)
        found[f"{alpha_us} {gb_per_s:g} {per_bucket}"] = {
            "step_ms": round(1e3 * accounting(layers, ddp.RANKS, link, **bucketed).step_s, 3),
            "sends": [[round(start, 3), round(length, 3), text] for start, length, text in sends],
        }
    return found


def schedules() -> dict[str, Any]:
    """By kind, stages, micro-batches and chunks: (backward?, micro-batch, chunk, start) of each rank's actions."""
    cases = [(kind, p, m, 1) for kind in ("gpipe", "1f1b") for p in (2, 3, 4) for m in range(1, 9)]
    cases += [("interleaved", p, m, v) for p in (2, 3, 4) for m in range(p, 9, p) for v in (2, 3)]
    found = {}
    for kind, p, m, v in cases:
        run, ranks = mesh.simulate(kind, m, v, p), []
        for actions, starts in zip(run.ranks, run.starts, strict=True):
            timed = zip(actions, starts, strict=True)
            ranks.append([[int(a.kind == "backward"), a.micro_batch, a.chunk, round(start, 3)] for a, start in timed])
        entry = {"ranks": ranks, "length": round(run.length, 3), "bubble": round(run.bubble, 4), "live": run.live}
        found[f"{kind} {p} {m} {v}"] = entry
    return found


def growth() -> dict[str, Any]:
    """By precision and ranks: (parameters, gradients, state) in bytes per parameter for each stage."""
    found: dict[str, Any] = {"models": MODELS, "gpu_bytes": GPU_BYTES, "stages": [name for name, _ in zero.STAGES]}
    for precision, world in product(("mixed", "float32"), (2**i for i in range(11))):
        sizes = [zero.bytes_per_parameter(method, world, precision) for _, method in zero.STAGES]
        found[f"{precision} {world}"] = sizes
    return found


def layers() -> dict[str, Any]:
    """The roofs of each device. The figure computes the point of a shape, since there are too many shapes."""
    devices = [cluster(name, 1).device for name in CLUSTERS]
    return {d.name: [d.peak_flops, d.hbm_bytes_per_s] for d in devices}


def grid() -> dict[str, Any]:
    """By mesh of eight ranks: each rank's coordinates, and the groups along each axis."""
    found: dict[str, Any] = {}
    for sizes in product((1, 2, 4, 8), repeat=len(AXES)):
        if math.prod(sizes) != 8:
            continue
        layout = Mesh(*sizes, rank=0)
        name = " × ".join(f"{axis} {n}" for axis, n in layout.sizes.items() if n > 1)
        coordinates = [list(layout.coordinate(rank).values()) for rank in range(layout.world)]
        found[name] = {"places": coordinates, "groups": {axis: layout.partition(axis) for axis in AXES}}
    return found


def journey() -> dict[str, Any]:
    """The stops of the front page's picture."""
    stops = []
    for stop in trip.stops():
        seconds = {part: round(s, 4) for part, s in stop.seconds.items()}
        stops.append({"name": stop.name, "seconds": seconds, "gb": {kind: round(n, 3) for kind, n in stop.gb.items()}})
    return {"card_gb": trip.CARD_GB, "stops": stops}


MOVING = (journey, ring, tiles, buckets, schedules, growth, layers, grid)
