"""A profile as a table by range and kernel, with the share of time in matrix products."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.autograd.profiler_util import FunctionEvent

from lab.provided import provided

MATRIX_PRODUCTS = provided(
    frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::_scaled_mm"})
)


@provided
@dataclass(frozen=True)
class Row:
    """All calls of one kernel or operator within one range."""

    range: str  # the innermost; "" outside of all
    name: str
    calls: int
    seconds: float


@provided
@dataclass(frozen=True)
class KernelTable:
    """rows: longest time first. Shares of matrix products, 0 to 1: in the whole table, and in each range's time."""

    rows: tuple[Row, ...]
    product_share: float  # of all the time in the table
    product_share_by_range: dict[str, float]


def kernel_table(events: Sequence[FunctionEvent]) -> KernelTable:
    """Tabulate `profile.events()` of a torch.profiler.profile that has ended.

    If operators launched kernels on a device (`event.kernels`, durations in µs), rows are kernels with their time
    there. Otherwise rows are operators with their own CPU time (`event.self_cpu_time_total`, µs), without the operators
    that they called. A range is a record_function (`event.is_user_annotation`), and not a row itself. A row belongs to
    the innermost range around its operator (`event.cpu_parent` leads outward). A kernel counts as a matrix product if
    the operator that launched it is in MATRIX_PRODUCTS, whatever its own name. Leave out events of a device
    (`event.device_type`), which list the same kernels again. "" is a range like others. A range without rows has no
    share; a share of no time is 0.
    """
    raise NotImplementedError(
        "benchmarking.kernel_table: Tabulate `profile.events()` of a torch.profiler.profile that has ended"
    )
