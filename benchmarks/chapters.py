"""Measures on a GPU the figures that the chapters print: `python -m benchmarks.chapters`; `--device cpu` rehearses it.

Times are medians by the device's clock unless a line says otherwise. Memory is the allocator's peak.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.course.assignment import ROOT
from lab.model.transformer import SIZES, Transformer, attention
from lab.solution.impl import load

from .attention import timed
from .mixed_precision import plain_step
from .results import parse_args, reason, write

Row = tuple[str, str, str]  # chapter, what, measured
DTYPES = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16}
gpu, impl = True, load(ROOT / "reference")


def main() -> None:
    """Measure, print, and write the results."""
    global gpu
    gpu = parse_args(__doc__).device == "cuda"
    rows: list[Row] = []
    benchmarking = (warming, asking, clocks, fusing, products, moving, models, profiled)
    with torch.device("cuda" if gpu else "cpu"):
        for part in (*benchmarking, layers, checkpoints, contexts, graphs):
            try:
                for row in part():
                    print(*row, sep=" | ", flush=True)
                    rows.append(row)
            except Exception as error:  # the other parts still run
                print(part.__name__, reason(error), flush=True)
                rows.append((part.__name__, "failed", reason(error)))
    if gpu:
        write("chapters", [dict(zip(("chapter", "what", "measured"), row, strict=True)) for row in rows])


def warming() -> Iterator[Row]:
    """The time of each of a program's first steps, by the host's clock."""
    size = "small" if gpu else "tiny"
    step = plain_step(SIZES[size], *batch_of(size, 8), torch.bfloat16)
    times = impl.benchmarking.benchmark.benchmark(step, warmup=0, steps=8 if gpu else 2).samples
    yield "benchmarking", "first steps of small, ms", " ".join(f"{1e3 * t:.1f}" for t in times)


def asking() -> Iterator[Row]:
    """How long the host takes to launch a large and a small matrix product, and the device to finish it."""
    for n in (64, 8192) if gpu else (64,):
        a = torch.randn(n, n, dtype=torch.bfloat16)
        for _ in range(3):
            a @ a
        wait()
        launched, done = [], []
        for _ in range(20):
            start = time.perf_counter()
            a @ a
            launched.append(time.perf_counter() - start)
            wait()
            done.append(time.perf_counter() - start)
        times = f"asked {1e6 * statistics.median(launched):.1f}, done {1e6 * statistics.median(done):.1f}"
        yield "benchmarking", f"product of {n} in bfloat16, µs", times


def clocks() -> Iterator[Row]:
    """Time calls between two events: after a flush of the cache, after a flush of one byte, and without a flush."""
    x = torch.randn(2**22 if gpu else 64, dtype=torch.bfloat16)
    a = torch.randn(1024 if gpu else 8, 1024 if gpu else 8, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"nothing": lambda: None, "x + 1 of 2^22 bfloat16": lambda: x + 1}
    calls |= {"product of 1,024": lambda: a @ a, "a hundred x + 1": lambda: [x + 1 for _ in range(100)]}
    for name, call in calls.items() if gpu else ():
        texts = []
        for flush in (2**28, 1, 0):
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(50)]
            buffer = torch.empty(max(flush, 1), dtype=torch.uint8)
            for start, end in pairs:
                if flush:
                    buffer.zero_()
                start.record()
                call()
                end.record()
                if not flush:
                    wait()
            wait()
            times = [1e3 * start.elapsed_time(end) for start, end in pairs[3:]]
            texts.append(f"{flush:,} B flushed {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})")
        yield "benchmarking", f"{name} between events, µs", ", ".join(texts)


def fusing() -> Iterator[Row]:
    """Chains of multiply-adds on one tensor: one kernel per operation, and compiled into one kernel."""
    x = torch.randn(2**26 if gpu else 64, dtype=torch.float32)
    for count in (1, 4, 16, 64, 256, 1024) if gpu else (1,):

        def chain(x: Tensor, count: int = count) -> Tensor:
            for _ in range(count):
                x = x * 0.999 + 0.001
            return x

        modes = {"eager": chain} | ({"compiled": torch.compile(chain, dynamic=False)} if gpu else {})
        times = {mode: seconds(lambda f=f: f(x)) for mode, f in modes.items() if mode == "compiled" or count <= 64}
        text = ", ".join(
            f"{mode} {1e6 * t:.1f} ({2e-12 * count * x.numel() / t:.3g} TFLOP/s)" for mode, t in times.items()
        )
        yield "benchmarking", f"{count} multiply-adds of 2^26 float32, µs", text


def products() -> Iterator[Row]:
    for name, dtype in DTYPES.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        speeds = []
        for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if gpu else (64,):
            a, b = (torch.randn(n, n, dtype=dtype) for _ in range(2))
            speeds.append(f"{n}: {2 * n**3 / seconds(lambda a=a, b=b: a @ b) / 1e12:.3g}")
        yield "benchmarking", f"products in {name}, TFLOP/s", ", ".join(speeds)
    torch.backends.cuda.matmul.allow_tf32 = False


def moving() -> Iterator[Row]:
    speeds = []
    for n in (2**16, 2**20, 2**24, 2**28, 2**30) if gpu else (2**10,):
        x, out = torch.randn(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
        speeds.append(f"{n:,}: {4 * n / seconds(lambda x=x, out=out: torch.add(x, 1, out=out)) / 1e9:.4g}")
    yield "benchmarking", "x + 1 of so many bfloat16, GB/s", ", ".join(speeds)


def models() -> Iterator[Row]:
    benchmark_model = impl.benchmarking.benchmark_model.benchmark_model
    for size in ("small", "medium", "large", "xl") if gpu else ("tiny",):
        times = []
        for mode in ("forward", "forward_backward", "step"):
            context = min(1024, SIZES[size].context)
            result = benchmark_model(Transformer(SIZES[size]), mode=mode, batch=4, context=context, steps=5)
            times.append(f"{mode} {1e3 * result.median:.1f} ± {1e3 * result.standard_deviation:.1f}")
        yield "benchmarking", f"{size}, batch 4, context 1,024, float32, ms", ", ".join(times)


def profiled() -> Iterator[Row]:
    """The slowest kernels of two forward passes, by torch's profiler."""
    model, (tokens, _) = Transformer(SIZES["small" if gpu else "tiny"]).to(torch.bfloat16), batch_of("small", 8)
    with torch.no_grad(), torch.profiler.profile() as profile:
        for _ in range(2):
            model(tokens)
        wait()
    key = "self_device_time_total" if gpu else "self_cpu_time_total"
    for line in profile.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=60).splitlines():
        yield "benchmarking", "profile", line


def layers() -> Iterator[Row]:
    """gate_proj of 8,192 tokens, and silu(g) · u eager and compiled."""
    tokens, width, hidden = (8192, 768, 2048) if gpu else (64, 32, 64)
    fused = torch.compile(lambda g, u: F.silu(g) * u) if gpu else None
    for name, dtype in DTYPES.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        x, w = torch.randn(tokens, width, dtype=dtype), torch.randn(width, hidden, dtype=dtype)
        g, u = (torch.randn(tokens, hidden, dtype=dtype) for _ in range(2))
        times = {"gate_proj": lambda x=x, w=w: x @ w, "silu(g) * u": lambda g=g, u=u: F.silu(g) * u}
        if fused:
            times["compiled"] = lambda g=g, u=u: fused(g, u)
        yield "mixed_precision", f"{name}, µs", ", ".join(f"{n} {1e6 * seconds(c):.1f}" for n, c in times.items())
    torch.backends.cuda.matmul.allow_tf32 = False


def checkpoints() -> Iterator[Row]:
    """Memory and time of forward and backward, with every block checkpointed and with none."""
    for size, context in (("small", 512), ("small", 1024), ("medium", 1024)) if gpu else (("tiny", 64),):
        tokens, targets = batch_of(size, 8, context)
        for variant in ("plain", "checkpointed"):
            model = Transformer(SIZES[size]).to(torch.bfloat16)
            if variant == "checkpointed":
                checkpoint_blocks(model)
            call = lambda m=model, b=(tokens, targets): m.loss(*b).backward()  # noqa: E731
            call()
            loss = None  # frees the previous model's loss
            gc.collect()
            before = allocated()
            loss = model.loss(tokens, targets)
            kept, counted = allocated() - before, impl.mixed_precision.saved_bytes.saved_bytes(loss, model.parameters())
            loss.backward()
            memory = f"kept {kept / 1e9:.3f} GB, saved_bytes {counted.total / 1e9:.3f}, peak {peak(call) / 1e9:.2f}"
            yield "mixed_precision", f"{size}, 8 × {context}, {variant}", f"{memory}, {1e3 * seconds(call):.1f} ms"


def checkpoint_blocks(model: Transformer) -> None:
    for block in model.blocks:
        inner: Any = block.forward
        block.forward = lambda *a, f=inner: impl.mixed_precision.checkpoint.checkpoint(f, *a)


def contexts() -> Iterator[Row]:
    """Forward and backward of causal attention (whole matrix, torch's, ours) by length, with 16 heads of 64."""
    flash = impl.flash_attention.speed.flash_attention
    variants: dict[str, Callable[..., Tensor]] = {"whole matrix": attention, "ours": flash}
    variants["torch's choice"] = lambda q, k, v, c: F.scaled_dot_product_attention(q, k, v, is_causal=c)
    for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536) if gpu else ():
        texts = []
        for name, attend in variants.items():
            try:
                q, k, v = (torch.randn(1, 16, n, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
                do = torch.randn_like(q)
                call = lambda a=attend, x=(q, k, v), d=do: torch.autograd.grad(a(*x, True), x, d)  # noqa: E731
                texts.append(f"{name} {1e3 * seconds(call):.3f} ms {peak(call) / 2**20:,.0f} MiB")
            except torch.OutOfMemoryError:
                texts.append(f"{name} out of memory")
        yield "flash_attention", f"{n:,} tokens", ", ".join(texts)


def graphs() -> Iterator[Row]:
    """A small model's forward pass, launched kernel by kernel and replayed as a graph, by the host's clock."""
    for size, batch, context in (("tiny", 1, 64), ("small", 1, 128), ("small", 8, 1024)) if gpu else ():
        model = Transformer(SIZES[size]).to(torch.bfloat16).requires_grad_(False)
        tokens, _ = batch_of(size, batch, context)
        graphed = impl.benchmarking.cuda_graph.GraphedStep(model, tokens)
        results = {n: impl.benchmarking.benchmark.benchmark(c) for n, c in (
            ("eager", lambda m=model, t=tokens: m(t)), ("graph", lambda g=graphed, t=tokens: g(t)))}  # fmt: skip
        text = ", ".join(f"{n} {1e3 * t.median:.3f}" for n, t in results.items())
        yield "benchmarking", f"forward of {size}, {batch} × {context}, ms", text


def batch_of(size: str, batch: int, context: int = 1024) -> tuple[Tensor, Tensor]:
    config = SIZES[size if gpu else "tiny"]
    tokens, targets = torch.randint(config.vocabulary, (2, batch, min(context, config.context))).unbind()
    return tokens, targets


def wait() -> None:
    if gpu:
        torch.cuda.synchronize()


def allocated() -> int:
    wait()
    return torch.cuda.memory_allocated() if gpu else 0


def peak(call: Callable[[], Any]) -> int:
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    call()
    wait()
    return torch.cuda.max_memory_allocated() if gpu else 0


def seconds(call: Callable[[], Any]) -> float:
    """Median seconds of ten calls after three warm-up calls, by the device's clock. On a CPU: two calls after one."""
    if not gpu:
        return impl.benchmarking.benchmark.benchmark(call, warmup=1, steps=2).median
    return statistics.median([timed(call) for _ in range(13)][3:])


if __name__ == "__main__":
    main()
