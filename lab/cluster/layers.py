"""The kernels and collectives of a transformer's layer, embedding and head, of one rank and one micro-batch.

Each is a line with its FLOPs, what it reads and writes, and its shape: what a framework launches, counted on paper.
n: tokens of the micro-batch; T: ranks of the tensor axis; E: bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .events import Collective, Compute, Event, Wait
from .jobs import Model, Recipe
from .prices import FUSED

TENSOR = "tensor"


@dataclass(frozen=True)
class Layers:
    """One micro-batch of `sequences` of `context` tokens on a rank of the tensor group `ranks`."""

    model: Model
    recipe: Recipe
    sequences: int
    context: int
    ranks: range

    @property
    def tokens(self) -> int:
        return self.sequences * self.context

    @property
    def tensor(self) -> int:
        return len(self.ranks)

    @property
    def stream(self) -> float:
        """Bytes of the residual stream, of all tokens."""
        return self.recipe.element * self.tokens * self.model.width

    @property
    def own(self) -> float:
        """Bytes of it between two tensor-parallel regions: a T-th with sequence parallelism."""
        return self.stream / (self.tensor if self.recipe.sequence else 1)

    def forward(self) -> list[Event]:
        """A layer: attention and feed-forward, each behind a norm and added to the stream."""
        return [*self._in_attention(), *self.core(), *self._out_attention(), *self._feed_forward()]

    def core(self, phase: str = "forward") -> list[Event]:
        """Scores, softmax, dropout and the sum over values."""
        m, b = self.model, self.recipe
        heads, s, d = self.sequences * m.heads // self.tensor, self.context, m.dim
        operands = b.element * self.tokens * d * (2 * m.heads + 2 * self._kv_heads) / self.tensor
        if b.fused_attention:
            return [Compute(2 * heads * s * s * d, operands, phase=phase, label=FUSED)]  # causal: a half of 4 · s² · d
        scores = heads * s * s
        events: list[Event] = [
            self._product((s, s, d), phase, "scores", batch=heads),
            Compute(0, 3 * scores, phase=phase, label="softmax"),  # Megatron's causal kernel reads a half, writes all
        ]
        if b.dropout:
            events.append(Compute(0, 5 * scores, phase=phase, label="dropout"))  # in, out, and a byte of mask
        return [*events, self._product((s, d, s), phase, "values", batch=heads)]

    def light(self) -> list[Event]:
        """Return what selective recomputation computes again. Without fused attention it is the core of attention.
        Fused attention keeps no scores: then it is both norms and the activation (Megatron-Core's `layernorm` and
        `mlp_act`)."""
        if not self.recipe.fused_attention:
            return self.core("recompute")
        return [_again(event) for event in (self._norm(), self._norm(), self._activation())]

    def backward(self, recompute: str) -> list[Event]:
        """The gradient of a layer, and before it what is computed again."""
        again: list[Event] = []
        if recompute == "full":
            again = [_again(event) for event in self.forward()]
        elif recompute == "selective":
            again = self.light()
        return [*again, *self._feed_forward_backward(), *self._attention_backward()]

    def embedding(self) -> list[Event]:
        traffic = 2 + (2 if self.model.positions else 0)
        events: list[Event] = [Compute(0, traffic * self.stream, label="embedding"), *self._scatter("forward")]
        return [*events, *self._dropout("forward")]

    def embedding_backward(self) -> list[Event]:
        events: list[Event] = self._gather("backward") if self.recipe.sequence else []
        return [*self._dropout("backward"), *events, Compute(0, 3 * self.stream, phase="backward", label="embedding")]

    def head(self) -> list[Event]:
        """Final norm, logits and cross-entropy over T parts of the vocabulary: the largest, and two sums a token."""
        m, n = self.model, self.tokens
        part = m.vocabulary // self.tensor
        entropy = (self.recipe.element + 4 + 4 + 8 + 8 + 4 + 8) * n * part  # cast, max, minus, exp, sum, divide
        return [
            self._norm(),
            *self._gather("forward"),
            self._product((n, part, m.width), "forward", "head"),
            Compute(0, entropy, label="cross-entropy"),
            *self._send("all_reduce", 4 * n, "forward"),
            *self._send("all_reduce", 8 * n, "forward"),
        ]

    def head_backward(self) -> list[Event]:
        m, n = self.model, self.tokens
        part = m.vocabulary // self.tensor
        entropy = (8 + 4 + self.recipe.element) * n * part  # scaled in place, and cast
        return [
            Compute(0, entropy, phase="backward", label="cross-entropy"),
            *self._product_backward((n, part, m.width), "head", enters=True),
            self._norm_backward(),
        ]

    # Attention

    @property
    def _kv_heads(self) -> int:
        return max(self.model.kv_heads, self.tensor)  # fewer are held more than once

    @property
    def _qkv(self) -> int:
        return (self.model.heads + 2 * self._kv_heads) * self.model.dim // self.tensor

    def _in_attention(self) -> list[Event]:
        m, n, e = self.model, self.tokens, self.recipe.element
        events: list[Event] = [self._norm(), *self._gather("forward")]
        events.append(self._product((n, self._qkv, m.width), "forward", "qkv"))
        if m.gated:
            turned = n * (m.heads + self._kv_heads) * m.dim / self.tensor
            return [*events, Compute(0, 2 * e * turned, label="rotate")]
        return [*events, Compute(0, 2 * e * n * self._qkv, label="bias")]

    def _out_attention(self) -> list[Event]:
        m, n = self.model, self.tokens
        events: list[Event] = []
        if not self.recipe.fused_attention:
            events.append(Compute(0, 2 * self.stream / self.tensor, label="transpose"))
        events.append(self._product((n, m.width, m.width // self.tensor), "forward", "projection"))
        return [*events, *self._scatter("forward"), self._add()]

    def _attention_backward(self) -> list[Event]:
        m, b, n, e = self.model, self.recipe, self.tokens, self.recipe.element
        heads, s, d = self.sequences * m.heads // self.tensor, self.context, m.dim
        events: list[Event] = [
            self._add_backward(),
            *self._product_backward((n, m.width, m.width // self.tensor), "projection", leaves=True),
        ]
        if b.fused_attention:
            operands = e * n * d * (4 * m.heads + 4 * self._kv_heads) / self.tensor
            events.append(Compute(4 * heads * s * s * d, operands, phase="backward", label=FUSED))
        else:
            scores = heads * s * s
            events.append(Compute(0, 2 * self.stream / self.tensor, phase="backward", label="transpose"))
            events.append(self._product((s, d, s), "backward", "d values", batch=heads))
            events.append(self._product((s, s, d), "backward", "d scores", batch=heads))
            if b.dropout:
                events.append(Compute(0, 5 * scores, phase="backward", label="dropout"))
            events.append(Compute(0, 4 * scores, phase="backward", label="softmax"))  # halves of two in, all out
            events += [self._product((s, d, s), "backward", name, batch=heads) for name in ("d queries", "d keys")]
            events.append(Compute(0, 2 * e * n * self._qkv, phase="backward", label="join d qkv"))
        if m.gated:
            turned = n * (m.heads + self._kv_heads) * d / self.tensor
            events.append(Compute(0, 2 * e * turned, phase="backward", label="rotate"))
        else:
            events.append(Compute(0, e * n * self._qkv, phase="backward", label="d bias"))
        events += self._product_backward((n, self._qkv, m.width), "qkv", enters=True)
        return [*events, self._norm_backward()]

    # Feed-forward

    def _feed_forward(self) -> list[Event]:
        m, n = self.model, self.tokens
        f = m.hidden // self.tensor
        first = (2 if m.gated else 1) * f
        return [
            self._norm(),
            *self._gather("forward"),
            self._product((n, first, m.width), "forward", "up"),
            self._activation(),
            self._product((n, m.width, f), "forward", "down"),
            *self._scatter("forward"),
            self._add(),
        ]

    def _activation(self) -> Compute:
        tensors = 3 if self.model.gated else 2  # read and written
        return Compute(
            0, self.recipe.element * self.tokens * tensors * self.model.hidden // self.tensor, label="activation"
        )

    def _feed_forward_backward(self) -> list[Event]:
        m, n, e = self.model, self.tokens, self.recipe.element
        f = m.hidden // self.tensor
        first = (2 if m.gated else 1) * f
        bias = 0 if m.gated else e * n * f
        return [
            self._add_backward(),
            *self._product_backward((n, m.width, f), "down", leaves=True),
            Compute(0, e * n * (f + 2 * first) + bias, phase="backward", label="activation"),
            *self._product_backward((n, first, m.width), "up", enters=True),
            self._norm_backward(),
        ]

    # Between regions: the stream, norms, and what the tensor axis sends

    def _norm(self) -> Compute:
        return Compute(0, 2 * self.own, label="norm")

    def _norm_backward(self) -> Compute:
        return Compute(0, 5 * self.own, phase="backward", label="norm")  # dx: 3; the weight's gradient reads 2 again

    def _add(self) -> Compute:
        """The stream's sum, with Megatron's bias and dropout in the same kernel."""
        mask = self.own / self.recipe.element if self.recipe.dropout else 0
        return Compute(0, 3 * self.own + mask, label="add")

    def _add_backward(self) -> Compute:
        extra = 0.0 if self.model.gated else self.own  # of the bias
        if self.recipe.dropout:
            extra += 2 * self.own + self.own / self.recipe.element
        return Compute(0, 3 * self.own + extra, phase="backward", label="add")

    def _dropout(self, phase: str) -> list[Event]:
        return [Compute(0, 2.5 * self.own, phase=phase, label="dropout")] if self.recipe.dropout else []

    def _gather(self, phase: str, handle: int | None = None) -> list[Event]:
        return self._send("all_gather", self.own, phase, handle) if self.recipe.sequence else []

    def _scatter(self, phase: str, handle: int | None = None) -> list[Event]:
        if self.recipe.sequence:
            return self._send("reduce_scatter", self.own, phase, handle)
        return self._send("all_reduce", self.stream, phase, handle)

    def _send(self, op: str, payload: float, phase: str, handle: int | None = None) -> list[Event]:
        return [] if self.tensor == 1 else [Collective(op, payload, self.ranks, phase, TENSOR, handle=handle)]

    # Products

    def _product(
        self, shape: tuple[int, int, int], phase: str, label: str, out: float | None = None, batch: int = 1
    ) -> Compute:
        """out: bytes that it writes, where they are not those of its result."""
        (m, n, k), e = shape, self.recipe.element * batch
        written = e * m * n if out is None else out
        return Compute(2 * batch * m * n * k, e * (m * k + k * n) + written, shape, batch, phase=phase, label=label)

    def _product_backward(
        self, shape: tuple[int, int, int], label: str, enters: bool = False, leaves: bool = False
    ) -> list[Event]:
        """Of y = x W: dx = dy Wᵀ and dW = xᵀ dy. leaves: y left its region; enters: x entered it, split over T.

        With sequence parallelism y's gradient is gathered where it left, and x again where it entered: beside dx, if
        the recipe overlaps; dx is scattered beside dW.
        """
        m, n, k = shape  # tokens, out, in
        b = self.recipe
        dx = self._product((m, k, n), "backward", f"d {label}")
        # Added to what the micro-batches before gave: by the product, or in a pass of its own over both.
        traffic = 2 * b.gradient * n * k if b.fused_accumulation else b.element * n * k
        events: list[Event] = [self._product((k, n, m), "backward", f"d {label} weight", traffic)]
        if not b.fused_accumulation:
            events.append(Compute(0, (b.element + 2 * b.gradient) * n * k, phase="backward", label="accumulate"))
        before = self._gather("backward") if leaves else []
        if not enters or self.tensor == 1:
            return [*before, dx, *events]
        if not b.overlap_tensor:
            return [*before, *self._gather("backward"), dx, *self._scatter("backward"), *events]
        gather = self._gather("backward", 1)
        return [
            *before, *gather, dx, *([Wait(1)] if gather else []), *self._scatter("backward", 2), *events, Wait(2),
        ]  # fmt: skip


def _again(event: Event) -> Event:
    return replace(event, phase="recompute") if isinstance(event, Compute | Collective) else event
