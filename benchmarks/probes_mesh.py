"""Probes of `benchmarks.mesh`: seconds, losses and bytes of steps along one axis, ours and torch's."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .side_by_side import CONFIG, RATE, Step, fully_sharded, loss_of, model, second_step, time_in_turn

MICRO_BATCHES = 4  # along pipe


def reference_step(impl: Any, axis: str, ranks: int) -> Step:
    """Return the reference's `train_step` of a model that `parallelize` has split along one axis."""
    mesh = impl.mesh.mesh.Mesh(**{axis: ranks})
    plan = impl.mesh.parallel.Plan(micro_batches=MICRO_BATCHES if axis == "pipe" else 1, fsdp=axis == "data")
    parallel = impl.mesh.compose.parallelize(model(), mesh, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=RATE)
    tokens, targets = batch(axis)
    return lambda: impl.mesh.compose.train_step(parallel, optimizer, tokens, targets)


def torch_step(impl: Any, axis: str, ranks: int) -> Step:
    """Return the same step with PyTorch's fully_shard, torch.distributed.pipelining or parallelize_module."""
    tokens, targets = batch(axis)
    if axis == "pipe":
        return _pipelined(impl, ranks, tokens, targets)
    wrapped = fully_sharded(model()) if axis == "data" else _tensor_parallel(model(), ranks)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE)

    def step() -> float:
        from torch.distributed.tensor.parallel import loss_parallel

        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(wrapped(tokens), targets)
            loss.backward()
        optimizer.step()
        return _mean(loss.detach(), axis, ranks)

    return step


VARIANTS = {"ours": reference_step, "torch": torch_step}


def batch(axis: str) -> tuple[Tensor, Tensor]:
    """Sequences of 64 tokens: along data one per rank; along pipe one per micro-batch; equal on all ranks otherwise."""
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if axis == "data" else 0))
    shape = (2, MICRO_BATCHES if axis == "pipe" else 1, CONFIG.context)
    tokens, targets = torch.randint(CONFIG.vocabulary, shape, generator=generator).unbind()
    return tokens, targets


def seconds(impl: Any, axis: str, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant's steps, taken in turn."""
    return time_in_turn({name: make(impl, axis, ranks) for name, make in VARIANTS.items()}, rounds)


def losses_of(impl: Any, axis: str, ranks: int, steps: int) -> dict[str, list[float]]:
    """Losses of each variant's first steps."""
    return {name: [float(step()) for _ in range(steps)] for name, step in (  # type: ignore[arg-type]
        (name, make(impl, axis, ranks)) for name, make in VARIANTS.items()
    )}  # fmt: skip


def bytes_of(impl: Any, axis: str, ranks: int, name: str) -> dict[str, float]:
    """Bytes held and sent in one variant's second step, as `second_step` returns them."""
    return second_step(lambda: VARIANTS[name](impl, axis, ranks))


def _mean(loss: Any, axis: str, ranks: int) -> float:
    """The mean loss of the whole batch, on every rank, as `train_step` returns it."""
    value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    if axis == "data":
        dist.all_reduce(value)
        value /= ranks
    return value.item()


def _tensor_parallel(plain: nn.Module, ranks: int) -> nn.Module:
    """Parallelize as in torch's tutorial on tensor parallelism, with a loss on sharded logits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in (
        "attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"
    )}  # fmt: skip
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("attention.o_proj", "mlp.down_proj")}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(plain, init_device_mesh("cpu", (ranks,)), plan)


def _pipelined(impl: Any, ranks: int, tokens: Tensor, targets: Tensor) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, parallel = dist.get_rank(), impl.mesh.parallel
    layers = impl.mesh.compose.spread(CONFIG.layers, ranks)[rank]
    chunk = parallel.Chunk(model(), layers, parallel.Plan(), 1)
    stage = PipelineStage(chunk, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of)
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=RATE)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*(() if rank else (tokens,)), target=targets if rank == ranks - 1 else None, losses=losses)
        optimizer.step()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return mean.item()

    return step
