"""Computes the right answer to each written question: one function per question, called with the question's `given`.

Each function has the name of its question. Where possible it simulates, counts or measures the answer (simulated GPU,
memory meter, cost functions, ledger of the reference) instead of repeating the formula that a student would use.
Values are in base units: bytes, seconds, a fraction of 1. A multiple-choice answer is its letter.
"""

import functools
from contextlib import closing
from typing import Any

import torch

from lab.cluster.costs import Link, ring_cost, sent_bytes
from lab.course.assignment import ROOT
from lab.course.questions import default
from lab.harness.runner import Executor, Runner
from lab.measure.device import SimulatedGPU
from lab.measure.memory import meter
from lab.model.transformer import SIZES, Config, Transformer


@functools.cache
def truth(id: str) -> float | str:
    """Return the right answer to a question that is not prose. Raises KeyError if no function here computes it."""
    return globals()[id.replace(".", "_")](**default().questions[id].given)


def benchmarking_launch_bound(kernels: int, launch_us: float, run_us: float) -> float:
    gpu = SimulatedGPU(launch_s=1e-6 * launch_us, call_s=0.0)
    for _ in range(kernels):
        gpu.launch(1e-6 * run_us)
    gpu.synchronize()
    return gpu.now


def benchmarking_mfu(batch: int, context: int, seconds: float, tflops: float) -> float:
    return 3 * _forward_flops(SIZES["small"], batch, context) / (seconds * 1e12 * tflops)


def _forward_flops(config: Config, batch: int, context: int) -> float:
    """2 FLOPs per weight and token, plus the causal half of attention. A kit test checks it against the real model."""
    c = config
    block = 2 * c.width**2 + 2 * c.width * c.kv_heads * c.dim + 3 * c.width * c.hidden
    weights = c.layers * block + c.width * c.vocabulary
    attention = 2 * (2 * batch * config.heads * context**2 * config.dim) / 2  # scores and values, the causal half
    return 2 * batch * context * weights + config.layers * attention


def mixed_precision_loss_scale(gradient: float) -> float:
    scale = 1.0
    while gradient * scale < torch.finfo(torch.float16).tiny:
        scale *= 2
    return scale


def mixed_precision_kept(batch: int, context: int) -> float:
    model = Transformer(SIZES["tiny"])
    tokens = torch.randint(256, (batch, context))
    with meter([*model.parameters(), *model.buffers(), tokens]) as memory:
        loss = model.loss(tokens, tokens)
        saved_bytes = memory.live_bytes
    del loss
    return saved_bytes


def flash_attention_tiles(n: int, block_m: int, block_n: int) -> float:
    return sum(column <= row for row in range(block_m - 1, n, block_m) for column in range(0, n, block_n))


def flash_attention_whole_matrix(batch: int, heads: int, gb: float) -> float:
    n = 1
    while torch.empty(batch, heads, n, n, dtype=torch.bfloat16, device="meta").nbytes <= 1e9 * gb:
        n *= 2
    return n


def ddp_ring_bytes(millions: float, ranks: int) -> float:
    return sent_bytes("all_reduce", 4e6 * millions, ranks)


def ddp_flat_gain(tensors: int, mb: float, ranks: int, latency_us: float, gbps: float) -> float:
    link = Link(1e-6 * latency_us, 1e9 * gbps)
    per_tensor, flat = (link.cost_s("all_reduce", 1e6 * mb / parts, ranks) for parts in (tensors, 1))
    return tensors * per_tensor - flat


def zero_devices(billions: float, gb: float) -> float:
    ranks = 1
    while (2 + 2 + 12 / ranks) * billions > gb:  # GB: bf16 parameters, gradients; sharded float32 masters, two moments
        ranks += 1
    return ranks


def zero_step_bytes(ranks: int) -> float:
    with closing(Runner(Executor(ROOT / "reference"))) as runner:
        return runner.run(fsdp_step, world=ranks)[0]


def fsdp_step(impl: Any) -> float:
    """Probe: return the bytes that this rank sends in one step of the reference's FSDP, according to the ledger."""
    from lab.ranks.group import ledger

    torch.manual_seed(0)
    model = impl.zero.fsdp_gather.FSDP(Transformer(SIZES["tiny"]), small=0)
    optimizer = torch.optim.AdamW(model.parameters())
    start = len(ledger.rows)
    model(torch.randint(256, (1, 8))).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return sum(sent_bytes(r.op, r.bytes, len(r.group)) for r in ledger.rows[start:])


def mesh_across(width: int, hidden: int, degree: int, tokens: int) -> str:
    """A tensor rank holds 1/degree of SwiGLU's three matrices and attention's four, and computes all tokens."""
    weights, activations = 2 * (3 * width * hidden + 4 * width**2) / degree, 2 * tokens * width
    data = ring_cost("all_reduce", weights, degree, 0.0, 1.0)
    tensor = 4 * ring_cost("all_reduce", activations, degree, 0.0, 1.0)
    seconds = {"a": 10 * data + tensor, "b": data + 10 * tensor}
    return "c" if seconds["a"] == seconds["b"] else min(seconds, key=lambda letter: seconds[letter])


def mesh_tensor_limit(width: int, hidden: int, tflops: float, gbps: float) -> float:
    tokens, ranks = 4096, 1  # tokens cancel: both sides are proportional to them
    while True:
        gathered = ring_cost("all_gather", 2 * tokens * width / (ranks + 1), ranks + 1, 0.0, 1e-9 / gbps)
        scattered = ring_cost("reduce_scatter", 2 * tokens * width / (ranks + 1), ranks + 1, 0.0, 1e-9 / gbps)
        if gathered + scattered > 4 * tokens * width * hidden / (ranks + 1) / (1e12 * tflops):
            return ranks
        ranks += 1


def mesh_fsdp_limit(width: int, hidden: int, ranks: int, tflops: float, gbps: float) -> float:
    """Compare gathering A and B (2 bytes per number) with 2 FLOPs per number and token."""
    shard = 2 * 2 * width * hidden / ranks
    return ring_cost("all_gather", shard, ranks, 0.0, 1e-9 / gbps) * 1e12 * tflops / (4 * width * hidden)
