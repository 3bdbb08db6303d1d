"""Stand-ins of stage `mesh`: correct, but they keep, compute or send more than necessary."""

from .data import fsdp_axis, reduce_gradients
from .experts import attach, capacity, combine, dispatch, exchange, route
from .grid import mesh
from .pipeline import execute, schedule_1f1b, schedule_gpipe, schedule_interleaved
from .tensor import conjugates, parallel_attention, parallel_linear, sequence_parallel, vocab_parallel
