"""Devices, links and clusters from hardware.toml, which gives the source of each number."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .costs import Link

TABLE = Path(__file__).with_name("hardware.toml")
_NUMBERS = {  # by resource: (part of a cluster, the attributes of this part that `faster` multiplies)
    "products": ("device", ("peak_flops", "matmul_flops", "attention_flops")),
    "memory bandwidth": ("device", ("hbm_bytes_per_s",)),
    "memory": ("device", ("hbm_bytes",)),
    "links inside a node": ("inside", ("bytes_per_s",)),
    "links between nodes": ("between", ("bytes_per_s",)),
}
RESOURCES = tuple(_NUMBERS)


@dataclass(frozen=True)
class Device:
    """One GPU; units are FLOP/s, bytes, bytes/s and seconds."""

    name: str
    peak_flops: float  # dense, 16 bits
    hbm_bytes: float
    hbm_bytes_per_s: float
    hbm_share: float  # share of hbm_bytes_per_s that a copy reaches
    sms: int
    matmul_flops: float  # best measured rate, for a product of matmul_shape
    matmul_shape: tuple[int, int, int]
    attention_flops: tuple[float, float]  # fused, forward and backward
    kernel_s: float
    layer_share: float  # share of these rates that kernels reach when they run one after the other in a layer


@dataclass(frozen=True)
class Wire(Link):
    """The link of one device, in one direction. alpha_s: seconds per step of a ring; base_s: seconds per collective."""

    name: str = ""
    base_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """`gpus` devices, `node` of them on each node. Ranks are numbered node by node."""

    device: Device
    inside: Wire
    between: Wire
    node: int
    gpus: int

    def faster(self, resource: str, times: float = 2.0) -> Cluster:
        """Return this cluster with `times` as much of one of RESOURCES. Raises ValueError for another resource."""
        if resource not in _NUMBERS:
            raise ValueError(f"expected a resource among {', '.join(RESOURCES)}, got {resource!r}")
        name, numbers = _NUMBERS[resource]
        part = getattr(self, name)
        return replace(self, **{name: replace(part, **{n: _scaled(getattr(part, n), times) for n in numbers})})


def cluster(name: str, gpus: int) -> Cluster:
    """Return the cluster `name` with `gpus` devices. Raises ValueError for an unknown name, or a partly used node."""
    table = _table()
    if name not in table["cluster"]:
        raise ValueError(f"cluster: expected one of {', '.join(table['cluster'])}, got {name!r}")
    entry = table["cluster"][name]
    if gpus < 1 or (gpus > entry["devices"] and gpus % entry["devices"]):
        raise ValueError(f"gpus: expected at most {entry['devices']}, or a multiple of it (whole nodes), got {gpus}")
    device = Device(**_fields("device", entry["device"]))
    inside, between = (Wire(**_fields("link", entry[which])) for which in ("inside", "between"))
    return Cluster(device, inside, between, entry["devices"], gpus)


def _fields(kind: str, name: str) -> dict[str, Any]:
    numbers = _table()["every"][kind] | _table()[kind][name]
    return {k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items() if k != "sources"}


def _scaled(number: Any, times: float) -> Any:
    return tuple(n * times for n in number) if isinstance(number, tuple) else number * times


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))
