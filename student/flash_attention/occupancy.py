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
    raise NotImplementedError("flash_attention.occupancy: Return how many programs fit")
