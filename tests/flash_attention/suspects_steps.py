"""What the smaller exercises come to where one thing is wrong: statistics of softmax, weighted sums, the fused loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lab.judge import Suspects

from .suspects import TILES


def of_statistics(name: str, x: Tensor, widths: list[int]) -> Suspects:
    """What "maximum", "normaliser" or "lse" of rows may be instead, that came in tiles of these widths."""
    x = x.double()
    tiles = x.split(widths, -1)
    m, last = x.amax(-1), tiles[-1].amax(-1)
    normaliser = torch.exp(x - m[..., None]).sum(-1)
    if name == "maximum":
        yield "the maximum is that of all tiles, not of the last one", last
        yield "the maximum starts at −∞", m.clamp_min(0)
        return
    unscaled = _without_rescaling(tiles)
    if name == "normaliser":
        yield "where a tile raises the maximum, multiply the sum so far by exp(m_old − m_new)", unscaled
        yield "tiles come once: a generator has none for a second walk", torch.zeros_like(m)
        yield "exp of what is left when the maximum is subtracted", torch.exp(x).sum(-1)
        yield "the maximum starts at −∞", torch.exp(x - m.clamp_min(0)[..., None]).sum(-1)
        yield "is the sum of all tiles, not of the last one", torch.exp(tiles[-1] - last[..., None]).sum(-1)
        return
    yield "where a tile raises the maximum, multiply the sum so far by exp(m_old − m_new)", m + torch.log(unscaled)
    yield "lse is m + log of the normaliser: add the maximum", torch.log(normaliser)
    yield "lse is m + log of the normaliser: add the logarithm", m
    yield "the logarithm is the natural one", (m + torch.log(normaliser)) / math.log(2)
    yield "the logarithm is the natural one", m + torch.log2(normaliser)


def _without_rescaling(tiles: tuple[Tensor, ...]) -> Tensor:
    m, total = torch.full_like(tiles[0][..., 0], -math.inf), torch.zeros_like(tiles[0][..., 0])
    for tile in tiles:
        m = torch.maximum(m, tile.amax(-1))
        total = total + torch.exp(tile - m.masked_fill(m == -math.inf, 0.0)[..., None]).sum(-1)
    return total


PLURAL = {"query": "queries", "batch": "batch entries"}


def unwritten(got: Tensor, dims: str) -> str:
    """The last part of a dimension, where it was never written and the rest was; "" where that is not so.

    Memory that nobody wrote is NaN. dims: a name for each dimension.
    """
    missing = ~torch.isfinite(got)
    if not missing.any() or missing.ndim != len(dims.split(", ")):
        return ""
    for dim, name in enumerate(dims.split(", ")):
        parts = missing.movedim(dim, 0).reshape(missing.shape[dim], -1)
        some, whole = parts.any(1).tolist(), parts.all(1).tolist()
        first, last = some.index(True), len(some) - 1
        if first and some == whole and all(whole[first:]):
            if first == last:
                return f"{name} {last} was never written"
            return f"{PLURAL.get(name, f'{name}s')} {first} … {last} were never written"
    return ""


def read(laid: Tensor, *strides: int) -> Tensor | None:
    """What is read with other strides from where a tensor lies; None where that leaves its memory."""
    try:
        return laid.as_strided(laid.shape, strides).double()
    except RuntimeError:
        return None


def of_pattern(got: Tensor, suspects: Suspects) -> str:
    """The first that is no number where what came is none: of strides, where memory between the elements is NaN."""
    missing = ~torch.isfinite(got)
    return next((cause for cause, tensor in suspects if torch.equal(~torch.isfinite(tensor), missing)), "")


def of_strides(x: Tensor, weight: Tensor) -> Suspects:
    """What y = x w may be instead, of tensors that lie in memory as they are."""
    columns = x.shape[1]
    for cause, other_x, other_weight in (
        ("a row is at row · stride_row, not at row · columns", read(x, columns, x.stride(1)), weight),
        ("an element of a row is at column · stride_column, not at column", read(x, x.stride(0), 1), weight),
        ("an element of x is at row · stride_row + column · stride_column", read(x, columns, 1), weight),
        ("weight has a stride of its own, not 1", x, read(weight, 1)),
        ("none of the strides is used", read(x, columns, 1), read(weight, 1)),
    ):
        if other_x is not None and other_weight is not None:
            yield cause, other_x.double() @ other_weight.double()


def of_strides_in_backward(name: str, x: Tensor, weight: Tensor, dy: Tensor) -> Suspects:
    """What "dx" or "dweight" may be instead, of tensors that lie in memory as they are."""
    wanted = {"x": x, "weight": weight, "dy": dy}
    columns = x.shape[1]
    others = [
        ("dy has a stride of its own: it is read at stride 1", {"dy": read(dy, 1)}),
        ("weight has a stride of its own: it is read at stride 1", {"weight": read(weight, 1)}),
        ("a row of x is at row · stride_row, not at row · columns", {"x": read(x, columns, x.stride(1))}),
        ("an element of x is at row · stride_row + column · stride_column", {"x": read(x, columns, 1)}),
    ]
    for cause, other in others:
        if all(t is not None for t in other.values()):
            of = {n: t.double() for n, t in (wanted | other).items()}
            yield cause, of["dy"][:, None] * of["weight"] if name == "dx" else of["dy"] @ of["x"]
    if name == "dx":
        right = dy.double()[:, None] * weight.double()
        place = torch.arange(len(x))[:, None] * x.stride(0) + torch.arange(columns) * x.stride(1)
        memory = right.new_full((max(int(place.max()) + 1, right.numel()),), torch.nan)
        memory[place] = right
        cause = "the values are right and lie where x's strides put them: dx has strides of its own"
        yield cause, memory[: right.numel()].view_as(right)


def of_weighted_sum(x: Tensor, weight: Tensor) -> Suspects:
    """What y = x w may be instead."""
    x, weight = x.double(), weight.double()
    columns = x.shape[1]
    yield "does the mask end where the columns do?", x[:, :-1] @ weight[:-1]
    for n in (*TILES, 256):
        full, begin = columns // n * n, -(-columns // n) * n - n
        yield "is the last tile of columns read where it is not full?", x[:, :full] @ weight[:full]
        yield "all tiles of columns are added up, not the last one alone", x[:, begin:] @ weight[begin:]
        yield "all tiles of columns are added up, not the first one alone", x[:, :n] @ weight[:n]


def of_weighted_sum_gradients(name: str, x: Tensor, weight: Tensor, dy: Tensor) -> Suspects:
    """What "dx" or "dweight" may be instead."""
    x, weight, dy = x.double(), weight.double(), dy.double()
    if name == "dx":
        yield "a row of dx is dy of that row times weight", weight.expand_as(x)
        yield "a row of dx is dy of that row times weight", dy[:, None].expand_as(x)
        return
    yield "is each row of x multiplied by its dy?", x.sum(0)
    for n in (*TILES, 256):
        full, begin = len(x) // n * n, -(-len(x) // n) * n - n
        yield "is the last tile of rows read where it is not full?", dy[:full] @ x[:full]
        yield "all tiles of rows are added up, not the first one alone", dy[:n] @ x[:n]
        yield "all tiles of rows are added up, not the last one alone", dy[begin:] @ x[begin:]


def of_fused_loss(name: str, case: dict) -> Suspects:
    """What "loss", "dx" or "dweight" may be instead. case: x, weight, targets, chunk, dloss (the incoming gradient)."""
    x, weight, targets, dloss = case["x"].double(), case["weight"].double(), case["targets"], case["dloss"]
    rows = len(x)
    dtype, most = case["x"].dtype, torch.finfo(case["x"].dtype).max
    logits = x @ weight.T
    softmax, lse = logits.softmax(-1), logits.logsumexp(-1)
    one_hot = torch.zeros_like(softmax).scatter_(1, targets[:, None], 1.0)
    losses, each = lse - logits.gather(1, targets[:, None])[:, 0], (softmax - one_hot) * dloss / rows

    def gradient(of_logits: Tensor) -> Tensor:
        return of_logits @ weight if name == "dx" else of_logits.T @ x

    if name == "loss" and dtype != torch.float32:
        cause = f"logits become float32 before softmax and loss: here they are {str(dtype)[6:]} throughout"
        for n in _chunks(case["chunk"]):
            yield from ((cause, loss) for loss in _losses_in_low_precision(case, n))
    if name != "loss" and abs(dloss) > most:
        yield (
            f"the incoming gradient, {dloss:,.0f}, is above {most:,.0f}, the most that {str(dtype)[6:]} holds: "
            "multiply in float32, then round",
            gradient(each / dloss).to(dtype) * torch.tensor(dloss).to(dtype),
        )
    if name == "loss":
        yield "the mean over rows, not the sum", losses.sum()
        yield "the loss itself, whatever gradient comes in later", losses.mean() * dloss
    else:
        yield "the incoming gradient is a factor of both gradients", gradient(each / dloss)
        yield "the loss is a mean: its gradient is divided by the number of rows", gradient(each * rows)
        yield "subtract 1 at the target: softmax − one-hot", gradient(softmax * dloss / rows)
        yield "is it softmax − one-hot, and not the other way round?", gradient(-each)
    for n in _chunks(case["chunk"]):
        parts = losses.split(n)
        full, begin = rows // n * n, -(-rows // n) * n - n
        if name == "loss":
            means = torch.stack([part.mean() for part in parts])
            yield "chunks need not be of one size: the mean is over rows, not over chunks", means.mean()
            yield "a chunk that is not full counts for as many rows as it has", means.sum() * n / rows
            yield "add up the sums of chunks, and divide by the number of rows", means.sum()
            yield "is the last chunk taken where it is not full?", losses[:full].sum() / rows
            yield "is the last chunk taken where it is not full?", losses[:full].mean()
            yield "all chunks count, not the last one alone", losses[begin:].sum() / rows
            yield "all chunks count, not the last one alone", losses[begin:].mean()
            continue
        yield "divide by the number of all rows, not of a chunk's", gradient(each * rows / n)
        own = torch.tensor([rows / len(part) for part in parts for _ in part], dtype=each.dtype)
        yield "divide by the number of all rows, not of a chunk's", gradient(each * own[:, None])
        if name == "dweight":
            yield "is the last chunk taken where it is not full?", each[:full].T @ x[:full]
            yield "all chunks are added up, not the last one alone", each[begin:].T @ x[begin:]
            yield "all chunks are added up, not the first one alone", each[:n].T @ x[:n]


def _losses_in_low_precision(case: dict, n: int) -> Iterator[Tensor]:
    """The mean loss with all in the inputs' dtype, or with sums of rows in float32, in chunks of n."""
    x, weight, targets = case["x"], case["weight"], case["targets"][:, None]
    logits = [part @ weight.T for part in x.split(n)]
    each = [s.logsumexp(-1, keepdim=True) - s.gather(1, t) for s, t in zip(logits, targets.split(n), strict=True)]
    yield torch.stack([part.sum().float() for part in each]).sum() / len(x)
    yield torch.cat(each).float().mean()


def _chunks(chunk: int | None) -> tuple[int, ...]:
    """How many rows a chunk may have: as was asked for, or what somebody may have chosen."""
    return (chunk,) if chunk else (16, 32, 64, 128, 256, 512, 1024)
