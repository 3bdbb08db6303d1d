"""How many programs a multiprocessor runs at a time, and which resource limits the number."""

from dataclasses import dataclass
from typing import Literal

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one streaming multiprocessor. Defaults: H100 and H200 (compute capability 9.0)."""

    warps: int = 64
    programs: int = 32
    registers: int = 65_536
    register_unit: int = 256  # a warp's registers are handed out in multiples of it
    shared_bytes: int = 228 * 1024
    shared_unit: int = 128
    shared_reserved: int = 1024  # of each program, by the system


@provided
@dataclass(frozen=True)
class Occupancy:
    """programs, warps: at a time. share: of the most warps possible. limited_by: the resource that runs out first."""

    programs: int
    warps: int
    share: float
    limited_by: Literal["warps", "programs", "registers", "shared memory"]


def occupancy(
    registers: int, shared_bytes: int, warps: int, multiprocessor: Multiprocessor = Multiprocessor()
) -> Occupancy:
    """Return how many programs fit. Each needs warps, registers and shared memory, rounded up to allocation units.

    registers: per thread (a warp has 32 threads). shared_bytes: per program, without the bytes that the system
    reserves. warps: per program. A program needs warps · (32 · registers, rounded up to register_unit) registers, and
    shared_bytes + shared_reserved bytes of shared memory, rounded up to shared_unit. If several limits tie, name the
    first in the order warps, programs, registers, shared memory. The result is 0 for a program that does not fit.
    Raises ValueError unless 1 ≤ registers ≤ 255, shared_bytes ≥ 0 and warps ≥ 1.
    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """
    if not 1 <= registers <= 255 or shared_bytes < 0 or warps < 1:
        raise ValueError(
            f"expected registers 1 to 255, shared_bytes >= 0, warps >= 1, got {registers}, {shared_bytes}, {warps}"
        )
    m = multiprocessor
    limits = {
        "warps": m.warps // warps,
        "programs": m.programs,
        "registers": m.registers // (warps * _up(32 * registers, m.register_unit)),
        "shared memory": m.shared_bytes // max(1, _up(shared_bytes + m.shared_reserved, m.shared_unit)),
    }
    limited_by = min(limits, key=limits.__getitem__)
    programs = limits[limited_by]
    return Occupancy(programs, programs * warps, programs * warps / m.warps, limited_by)  # type: ignore[arg-type]


def _up(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
