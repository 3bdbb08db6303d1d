"""Compares the speed of attention functions on a GPU: `PYTHONPATH=. python -m benchmarks.attention`.

Peers are PyTorch's FlashAttention-2, the package flash_attn if it is installed, cuDNN, FlexAttention, compiled naive
attention, and each `--peer path:function`. Rounds are interleaved, so that all share clocks and heat. It also measures
the peak rate of matrix products, and compares results on fresh inputs after timing. All tensors are bfloat16, with
batch · N = 16,384 and heads · dim = 2,048. A stopped run continues where it was.
"""

import functools
import math
import os
import statistics
from collections.abc import Callable, Collection
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lab.course.assignment import ROOT
from lab.solution.impl import load

from .peers import PEER
from .results import RowCache, parse_args, reason

GOALS = "Goals on Hopper, N >= 4,096: forward 1.4 x FlashAttention-2 and 0.9 x cuDNN, backward 1.3 x FlashAttention-2."
TOKENS, WIDTH = 16384, 2048
PEERS = ["ours", "flash2", "flash_attn", "cudnn", "flex", "compiled"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure, print, and write the results."""
    lengths = {"nargs": "+", "type": int, "default": [512, 1024, 2048, 4096, 8192, 16384]}
    options = parse_args(__doc__, lengths=lengths, rounds={"type": int, "default": 20, "help": "at least 2"}, peer=PEER)
    if options.device == "cpu":
        return smoke(dict(options.peer))
    ceiling, cache = matrix_ceiling(), RowCache("attention")
    for dim in (64, 128):
        for is_causal in (False, True):
            for n in options.lengths:
                if not cache.has(dim=dim, causal=is_causal, N=n):
                    cache.add(*measure(dim, n, is_causal, options, ceiling))
                    print(*cache.rows[-3:], sep="\n", flush=True)
    note = (
        f"{torch.cuda.get_device_name()}: {ceiling / 1e12:.0f} TFLOP/s measured in bfloat16 products of 8,192. {GOALS}"
    )
    rows = cache.rows
    print(cache.write(note))
    if lost := [f"{r['what']} at dim {r['dim']}, N {r['N']}" + ", causal" * r["causal"] for r in rows if not r["ours"]]:
        raise SystemExit(f"ours did not run: {'; '.join(lost)}")


def candidates(
    names: Collection[str], is_causal: bool, n: int, dim: int, peers: dict[str, Callable]
) -> dict[str, Attend]:
    """Return the attention functions that are installed and possible at this size, then the user's, by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(backend: Any) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        return attend

    def flex() -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if is_causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask)

    def flash_attn() -> Attend:
        from flash_attn import flash_attn_func  # takes tensors (batch, N, heads, dim)

        return lambda *qkv: flash_attn_func(*(x.transpose(1, 2) for x in qkv), causal=is_causal).transpose(1, 2)

    def adapt(forward: Callable) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            got = forward(q, k, v, is_causal)
            return got if isinstance(got, Tensor) else got[0]

        return attend

    ours = fastest(dim)
    makers: dict[str, Callable[[], Attend]] = {
        "ours": lambda: lambda q, k, v: ours(q, k, v, is_causal),
        "flash2": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "flash_attn": flash_attn,
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
        "compiled": lambda: functools.partial(torch.compile(naive, dynamic=False), is_causal=is_causal),
    }
    if n > 4096:
        makers.pop("compiled")  # the score matrix would fill the memory
    if not find_spec("flash_attn"):
        makers.pop("flash_attn")
    adapted = {name: adapt(forward) for name, forward in peers.items()}
    return {name: make() for name, make in makers.items() if name in names} | adapted


def fastest(dim: int) -> Callable[..., Tensor]:
    """Return our fastest attention. On Hopper at dim 65 to 128 it uses the forward kernel of `overlap`."""
    flash = load(ROOT / "reference").flash_attention
    if not 64 < dim <= 128 or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return flash.speed.flash_attention

    class Overlapped(flash.attention.FlashAttention):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
            o, lse = flash.overlap.attention_forward_overlapped(q, k, v, is_causal)
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.is_causal = is_causal
            return o

    return Overlapped.apply


def naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attention that stores the whole score matrix."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return s.softmax(-1) @ v


def measure(dim: int, n: int, is_causal: bool, options: Any, ceiling: float) -> list[dict]:
    """Measure one size. Return a row each for forward, backward and both."""
    q, k, v = inputs(n, dim)
    do = torch.randn_like(q)
    torch.compiler.reset()  # otherwise torch stops compiling after eight sizes
    calls = candidates(PEERS, is_causal, n, dim, dict(options.peer))
    columns = [
        "dim", "causal", "N", "what", *PEERS, *dict(options.peer), "of the ceiling", "over flash2", "over cudnn",
        "error over flash2's",
    ]  # fmt: skip
    rows = []
    for direction, products in (("forward", 2), ("backward", 5), ("both", 7)):
        flops = products * 2 * TOKENS * n * WIDTH * (0.5 if is_causal else 1.0)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(options.rounds + 4):
            for name in list(calls):
                try:
                    elapsed = seconds(calls[name], direction, q, k, v, do)
                except Exception as error:
                    print(f"{name}: no {direction} at dim {dim}, N {n}: {reason(error)}", flush=True)
                    if "CUDA error" in str(error):
                        raise SystemExit("after a CUDA error this process can measure nothing: run again") from None
                    calls.pop(name)
                    times.pop(name)
                    continue
                if i >= 4:
                    times[name].append(elapsed)
        row = {"dim": dim, "causal": is_causal, "N": n, "what": direction}
        for name, values in times.items():
            low, median, high = statistics.quantiles(values, n=4)
            spread = 100 * (high - low) / 2 / median
            row[name] = f"{flops / median / 1e12:.0f} ±{spread:.0f} %"
        if "ours" in times:
            ours = statistics.median(times["ours"])
            row["of the ceiling"] = f"{flops / ours / ceiling:.2f}"
            for peer in ("flash2", "cudnn"):
                row[f"over {peer}"] = f"{statistics.median(times[peer]) / ours:.2f}" if peer in times else ""
        row["error over flash2's"] = error_ratio(calls, dim, n, is_causal) if direction == "both" else ""
        rows.append({**dict.fromkeys(columns, ""), **row})
    return rows


def inputs(n: int, dim: int) -> list[Tensor]:
    shape = (TOKENS // n, WIDTH // dim, n, dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def seconds(attend: Attend, direction: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> float:
    """Seconds of one call in this direction."""
    if direction == "forward":
        with torch.no_grad():
            return timed(lambda: attend(q, k, v))
    if direction == "both":
        return timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), do))
    o = attend(q, k, v)
    return timed(lambda: torch.autograd.grad(o, (q, k, v), do))


def timed(call: Callable[[], Any]) -> float:
    """Seconds of the call on the device, between two events. The device finishes all earlier work first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # gives the host two milliseconds to issue the launches
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def error_ratio(calls: dict[str, Attend], dim: int, n: int, is_causal: bool) -> str:
    """Return the largest ratio of our error to flash2's over o, dq, dk and dv.

    Inputs are fresh, and of one head, so that the float32 reference fits. Raises SystemExit if the ratio exceeds 2.
    """
    if not {"ours", "flash2"} <= calls.keys():
        return "not checked: no flash2"
    x = [t.detach()[:1, :1].clone().requires_grad_() for t in inputs(n, dim)]
    do = torch.randn_like(x[0])
    x_float32 = [t.detach().float().requires_grad_() for t in x]
    want = naive(*x_float32, is_causal)
    expected = [want, *torch.autograd.grad(want, x_float32, do.float())]
    errors = {}
    for name in ("ours", "flash2"):
        o = calls[name](*x)
        got = [o, *torch.autograd.grad(o, x, do)]
        errors[name] = [(g.float() - w).abs().max().item() for g, w in zip(got, expected, strict=True)]
    ratio = max(ours / peer for ours, peer in zip(errors["ours"], errors["flash2"], strict=True))
    if not ratio <= 2:
        raise SystemExit(
            f"wrong at dim {dim}, N {n}, causal {is_causal}: errors {errors['ours']}, flash2's {errors['flash2']}"
        )
    return f"{ratio:.2f}"


def matrix_ceiling() -> float:
    """FLOP/s of large matrix products in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [timed(lambda: a @ b) for _ in range(25)]
    return 2 * 8192**3 / statistics.median(times[5:])


def smoke(peers: dict[str, Callable]) -> None:
    """Run our attention and the user's in Triton's interpreter, and print their largest differences to naive()."""
    os.environ["TRITON_INTERPRET"] = "1"
    q, k, v = (torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(3))
    for name, attend in candidates(["ours"], True, 64, 32, peers).items():
        try:
            difference = (attend(q, k, v) - naive(q, k, v, True)).abs().max().item()
        except Exception as error:
            if name == "ours":
                raise
            print(f"{name}: does not run on a CPU: {reason(error)}")
        else:
            print(f"{name} on a CPU: nothing is kept; largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
