"""Devices, links and clusters from hardware.toml, where each number has its source."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("hardware.toml")
RESOURCES = ("products", "memory bandwidth", "memory", "links inside a node", "links between nodes")


@dataclass(frozen=True)
class Device:
    """One GPU; units are FLOP/s, bytes, bytes/s and seconds."""

    name: str
    peak_flops: float  # dense, 16 bits
    hbm_bytes: float
    hbm_bytes_per_s: float
    hbm_share: float  # of it that a copy reaches
    sms: int
    matmul_flops: float  # the best measured, at matmul_shape
    matmul_shape: tuple[int, int, int]
    attention_flops: tuple[float, float]  # fused, forward and backward
    kernel_s: float
    layer_share: float  # of all these rates that kernels reach one after the other in a layer


@dataclass(frozen=True)
class Wire:
    """What joins devices: in one direction, of one device; alpha_s a step of a ring, base_s once a collective."""

    name: str
    bytes_per_s: float
    alpha_s: float
    base_s: float


@dataclass(frozen=True)
class Cluster:
    """`gpus` devices, `node` of them on a node: ranks are numbered node after node."""

    device: Device
    inside: Wire
    between: Wire
    node: int
    gpus: int

    def faster(self, resource: str, times: float = 2.0) -> Cluster:
        """The same cluster with so many times as much of one of RESOURCES."""
        d, inside, between = self.device, self.inside, self.between
        if resource == "products":
            attention = (d.attention_flops[0] * times, d.attention_flops[1] * times)
            d = replace(
                d, peak_flops=d.peak_flops * times, matmul_flops=d.matmul_flops * times, attention_flops=attention
            )
        elif resource == "memory bandwidth":
            d = replace(d, hbm_bytes_per_s=d.hbm_bytes_per_s * times)
        elif resource == "memory":
            d = replace(d, hbm_bytes=d.hbm_bytes * times)
        elif resource == "links inside a node":
            inside = replace(inside, bytes_per_s=inside.bytes_per_s * times)
        elif resource == "links between nodes":
            between = replace(between, bytes_per_s=between.bytes_per_s * times)
        else:
            raise ValueError(f"expected a resource among {', '.join(RESOURCES)}, got {resource!r}")
        return replace(self, device=d, inside=inside, between=between)


def cluster(name: str, gpus: int) -> Cluster:
    """The cluster of that name with `gpus` devices. Raises ValueError for a name there is not, and for half a node."""
    table = _table()
    if name not in table["cluster"]:
        raise ValueError(f"cluster: expected one of {', '.join(table['cluster'])}, got {name!r}")
    entry = table["cluster"][name]
    if gpus < 1 or (gpus > entry["devices"] and gpus % entry["devices"]):
        raise ValueError(f"gpus: expected at most {entry['devices']}, or a multiple of it (whole nodes), got {gpus}")
    device = dict(table["device"][entry["device"]])
    device = {k: tuple(v) if isinstance(v, list) else v for k, v in device.items() if k != "sources"}
    inside, between = (_wire(table["link"][entry[which]]) for which in ("inside", "between"))
    return Cluster(Device(**device), inside, between, entry["devices"], gpus)


def _wire(entry: dict[str, Any]) -> Wire:
    return Wire(**{k: v for k, v in entry.items() if k != "sources"})


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))
