"""What counted bytes have too many or too few, as tensors of a shape, so that a message can name the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lab.judge import harmless

LOSS_BYTES = 8  # the loss itself may be kept or not
MOST = 16  # tensors of one shape, a layer
OTHER = {"layers": 0, "hidden": 3, "vocabulary": 7, "batch": 1, "context": 5}  # what explains one case explains this


@dataclass(frozen=True)
class Case:
    """Sizes of a model and its batch."""

    sizes: dict
    batch: int
    context: int
    precision: str
    segment: int | None

    def more(self, **by: int) -> Case:
        sizes = {name: size + by.get(name, 0) for name, size in self.sizes.items()}
        sizes["context"] = max(sizes["context"], self.context + by.get("context", 0))
        return replace(
            self, sizes=sizes, batch=self.batch + by.get("batch", 0), context=self.context + by.get("context", 0)
        )

    def told(self) -> tuple:
        return self.sizes, self.batch, self.context, self.precision, self.segment


@dataclass(frozen=True)
class Piece:
    """A tensor that counts, or does not."""

    shape: str
    bytes: int
    in_layers: bool  # or once
    missing: str = ""
    surplus: str = ""


@harmless
def of(name: str, case: Case, ask: Callable[[Case], tuple[dict, dict]]) -> str:
    """What is missing, or too much, in this case and in a larger one; ask: counted and measured."""
    got, want = ask(case)
    if name == "activations" and abs(got[name] - want["after_forward"]) <= LOSS_BYTES:
        return (
            "that is what is kept when forward ends; the most is kept in backward, when a segment has been recomputed "
            "beside the inputs of those before it"
        )
    larger = case.more(**OTHER)
    other_got, other_want = ask(larger)
    differences = got[name] - want[name], other_got[name] - other_want[name]
    told = [
        explained
        for piece, other in zip(pieces(name, case), pieces(name, larger), strict=True)
        if (explained := fits(piece, other, differences, case))
    ]
    simplest = min((rank for rank, _ in told), default=None)
    return " or ".join(text for rank, text in told if rank == simplest) or grown(name, case, ask)


def fits(piece: Piece, other: Piece, differences: tuple[int, int], case: Case) -> tuple[tuple[bool, int], str] | None:
    """How many of this tensor explain both differences, and how simply: as many in each layer, and few."""
    count = round(differences[0] / piece.bytes) if piece.bytes else 0
    layers = case.sizes["layers"] if piece.in_layers else 1
    if not count or abs(count) > MOST * layers:
        return None
    if any(abs(d - count * p.bytes) > LOSS_BYTES for d, p in zip(differences, (piece, other), strict=True)):
        return None
    n, each = abs(count), ""
    if case.segment is None and piece.in_layers and not n % layers:
        n, each = n // layers, " in each layer"
    word, hint = ("missing", piece.missing) if count < 0 else ("too much", piece.surplus)
    rank = piece.in_layers and case.segment is None and not each, n
    return rank, f"exactly {n} × {piece.shape}{each} {'is' if n == 1 else 'are'} {word}{hint and ': '}{hint}"


def pieces(name: str, case: Case) -> Iterator[Piece]:
    return _activations(case) if name == "activations" else _parameters(case)


def _activations(case: Case) -> Iterator[Piece]:
    s, small = case.sizes, {"float32": 4, "bfloat16": 2}[case.precision]
    tokens, dim, of = case.batch * case.context, s["width"] // s["heads"], f"of {case.precision}"
    yield Piece(
        "(tokens, vocabulary) of float32", 4 * tokens * s["vocabulary"], False, "the log-probabilities of the loss",
        "of the loss, only the log-probabilities are kept",
    )  # fmt: skip
    yield Piece(
        f"(batch, heads, context, context) {of}", small * case.batch * s["heads"] * case.context**2, True,
        "the probabilities of attention", "scores are not kept, only the probabilities, once: softmax's result",
    )  # fmt: skip
    yield Piece("(context, context) of bool", case.context**2, True, "the causal mask")
    if s["heads"] > s["kv_heads"]:
        yield Piece(
            f"(tokens, (heads − kv_heads) · dim) {of}", small * tokens * (s["heads"] - s["kv_heads"]) * dim, True,
            f"keys and values, which {s['kv_heads']} of {s['heads']} heads have: they are repeated before the product",
        )  # fmt: skip
    yield Piece(f"(tokens, hidden) {of}", small * tokens * s["hidden"], True, "of SwiGLU", "of SwiGLU")
    size, inputs = case.segment, ""
    if size is not None:
        segments = -(-s["layers"] // size)
        inputs = f"every segment keeps its input, and there are {segments}"
    yield Piece(f"(tokens, width) {of}", small * tokens * s["width"], True, inputs, inputs)
    if small < 4:
        yield Piece("(tokens, width) of float32", 4 * tokens * s["width"], True, "a norm computes in float32")


def _parameters(case: Case) -> Iterator[Piece]:
    s, small = case.sizes, {"float32": 4, "bfloat16": 2}[case.precision]
    width, dim = small * s["width"], s["width"] // s["heads"]
    yield Piece("(vocabulary, width)", width * s["vocabulary"], False, "the embedding and the head are two matrices")
    yield Piece("(width, width)", width * s["width"], True)
    yield Piece("(width, kv_heads · dim)", width * s["kv_heads"] * dim, True, "keys, values", "keys, values")
    if s["heads"] > s["kv_heads"]:
        shape = "(width, (heads − kv_heads) · dim)"
        yield Piece(shape, width * (s["heads"] - s["kv_heads"]) * dim, True, "", "keys and values have kv_heads heads")
    yield Piece("(width, hidden)", width * s["hidden"], True, "of SwiGLU", "of SwiGLU")
    yield Piece("(width,)", width, True, "of norms", "of norms")


def grown(name: str, case: Case, ask: Callable[[Case], tuple[dict, dict]]) -> str:
    """With which size what is counted does not grow as what is measured."""
    got, want = (each[name] for each in ask(case))
    told = []
    for size in OTHER:
        more, really = (each[name] for each in ask(case.more(**{size: 1})))
        if abs(more - got - (really - want)) > max(LOSS_BYTES, 0.02 * abs(really - want)):
            told.append(f"{size}: {more - got:+,}, measured {really - want:+,}")
    return "what one more of a size adds, counted: " + "; ".join(told) if told else ""
