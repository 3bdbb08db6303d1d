"""The kernels and collectives of a transformer's layer, embedding and head, on one rank for one micro-batch.

Each line describes one kernel that a framework would launch: its FLOPs, the bytes it reads and writes, and its shape.
n: tokens of the micro-batch. T: ranks of the tensor axis. E: bytes per activation.
"""

from dataclasses import dataclass, replace

from .events import Collective, Compute, Event, Wait
from .jobs import Model, Recipe
from .prices import FUSED

TENSOR = "tensor"


@dataclass(frozen=True)
class Layers:
    """One micro-batch of `sequences` with `context` tokens each, on a rank of the tensor group `ranks`."""

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
        """Bytes of the residual stream, for all tokens."""
        return self.recipe.element * self.tokens * self.model.width

    @property
    def local_stream(self) -> float:
        """Bytes of the stream on one rank outside tensor-parallel regions. Sequence parallelism divides them by T."""
        return self.stream / (self.tensor if self.recipe.sequence else 1)

    def forward(self) -> list[Event]:
        """Return the forward of a layer: attention and feed-forward, each after a norm, with a residual addition."""
        m, n = self.model, self.tokens
        transpose = [] if self.recipe.fused_attention else [self._pass(2 * self.stream / self.tensor, "transpose")]
        rotated, name = (self._rotated, "rotate") if m.gated else (n * self._qkv, "bias")
        enter, leave = [self._norm(), *self._gather("forward")], [*self._scatter("forward"), self._add()]
        return [
            *enter,
            self._product((n, self._qkv, m.width), "forward", "qkv"),
            self._pass(2 * self.recipe.element * rotated, name),
            *self.core(),
            *transpose,
            self._product((n, m.width, m.width // self.tensor), "forward", "projection"),
            *leave,
            *enter,
            self._product((n, self._up, m.width), "forward", "up"),
            self._activation(),
            self._product((n, m.width, self._hidden), "forward", "down"),
            *leave,
        ]

    def core(self, phase: str = "forward") -> list[Event]:
        """Return the core of attention: scores, softmax, dropout and the weighted sum of values."""
        m, b = self.model, self.recipe
        heads, s, d = self.sequences * m.heads // self.tensor, self.context, m.dim
        operands = b.element * self.tokens * d * (2 * m.heads + 2 * self._kv_heads) / self.tensor
        if b.fused_attention:
            return [self._pass(operands, FUSED, phase, 2 * heads * s * s * d)]  # causal: half of 4 · s² · d
        scores = heads * s * s
        return [
            self._product((s, s, d), phase, "scores", batch=heads),
            self._pass(3 * scores, "softmax", phase),  # Megatron's causal kernel reads half of the scores, writes all
            *([self._pass(5 * scores, "dropout", phase)] if b.dropout else []),  # input, output, and a mask of 1 byte
            self._product((s, d, s), phase, "values", batch=heads),
        ]

    def light(self) -> list[Event]:
        """Return the kernels that selective recomputation repeats: without fused attention, the core of attention.

        Fused attention keeps no scores. So with fused attention we repeat both norms and the activation instead
        (`layernorm` and `mlp_act` of Megatron-Core).
        """
        if not self.recipe.fused_attention:
            return self.core("recompute")
        return [_repeated(event) for event in (self._norm(), self._norm(), self._activation())]

    def backward(self, recompute: str) -> list[Event]:
        """Return the kernels that recompute a layer's activations, and then its backward."""
        m, n, e = self.model, self.tokens, self.recipe.element
        events = {"none": list, "selective": self.light, "full": lambda: [_repeated(event) for event in self.forward()]}
        activation = e * n * (self._hidden + 2 * self._up) + (0 if m.gated else e * n * self._hidden)  # and the bias
        rotated, name = (2 * e * self._rotated, "rotate") if m.gated else (e * n * self._qkv, "d bias")
        return [
            *events[recompute](),
            self._add_backward(),
            *self._product_backward((n, m.width, self._hidden), "down", leaves=True),
            self._pass(activation, "activation", "backward"),
            *self._product_backward((n, self._up, m.width), "up", enters=True),
            self._norm_backward(),
            self._add_backward(),
            *self._product_backward((n, m.width, m.width // self.tensor), "projection", leaves=True),
            *self._core_backward(),
            self._pass(rotated, name, "backward"),
            *self._product_backward((n, self._qkv, m.width), "qkv", enters=True),
            self._norm_backward(),
        ]

    def _core_backward(self) -> list[Event]:
        m, n, e = self.model, self.tokens, self.recipe.element
        heads, s, d = self.sequences * m.heads // self.tensor, self.context, m.dim
        if self.recipe.fused_attention:
            operands = e * n * d * (4 * m.heads + 4 * self._kv_heads) / self.tensor
            return [self._pass(operands, FUSED, "backward", 4 * heads * s * s * d)]
        scores = heads * s * s
        return [
            self._pass(2 * self.stream / self.tensor, "transpose", "backward"),
            self._product((s, d, s), "backward", "d values", batch=heads),
            self._product((s, s, d), "backward", "d scores", batch=heads),
            *([self._pass(5 * scores, "dropout", "backward")] if self.recipe.dropout else []),
            self._pass(4 * scores, "softmax", "backward"),  # reads half of two inputs, writes all
            *(self._product((s, d, s), "backward", name, batch=heads) for name in ("d queries", "d keys")),
            self._pass(2 * e * n * self._qkv, "join d qkv", "backward"),
        ]

    def embedding(self) -> list[Event]:
        traffic = 2 + (2 if self.model.positions else 0)
        lookup = self._pass(traffic * self.stream, "embedding")
        return [lookup, *self._scatter("forward"), *self._dropout("forward")]

    def embedding_backward(self) -> list[Event]:
        summed = self._pass(3 * self.stream, "embedding", "backward")
        return [*self._dropout("backward"), *self._gather("backward"), summed]

    def head(self) -> list[Event]:
        """Return final norm, logits and sharded cross-entropy, which all-reduces a maximum and two sums per token."""
        m, n = self.model, self.tokens
        part = m.vocabulary // self.tensor
        entropy = (self.recipe.element + 4 + 4 + 8 + 8 + 4 + 8) * n * part  # cast, max, minus, exp, sum, divide
        return [
            self._norm(),
            *self._gather("forward"),
            self._product((n, part, m.width), "forward", "head"),
            self._pass(entropy, "cross-entropy"),
            *self._send("all_reduce", 4 * n, "forward"),
            *self._send("all_reduce", 8 * n, "forward"),
        ]

    def head_backward(self) -> list[Event]:
        m, n = self.model, self.tokens
        part = m.vocabulary // self.tensor
        entropy = (8 + 4 + self.recipe.element) * n * part  # scale in place, and cast
        return [
            self._pass(entropy, "cross-entropy", "backward"),
            *self._product_backward((n, part, m.width), "head", enters=True),
            self._norm_backward(),
        ]

    # Sizes on one rank

    @property
    def _kv_heads(self) -> int:
        return max(self.model.kv_heads, self.tensor)  # if there are fewer than T, several ranks hold the same head

    @property
    def _qkv(self) -> int:
        return (self.model.heads + 2 * self._kv_heads) * self.model.dim // self.tensor

    @property
    def _rotated(self) -> float:
        """Elements of queries and keys."""
        return self.tokens * (self.model.heads + self._kv_heads) * self.model.dim / self.tensor

    @property
    def _hidden(self) -> int:
        return self.model.hidden // self.tensor

    @property
    def _up(self) -> int:
        """Width of the feed-forward's first product. SwiGLU computes gate and up in it, so its width doubles."""
        return (2 if self.model.gated else 1) * self._hidden

    # Between regions: the stream, norms, and collectives of the tensor axis

    def _pass(self, bytes: float, label: str, phase: str = "forward", flops: float = 0) -> Compute:
        return Compute(flops, bytes, phase=phase, label=label)

    def _activation(self) -> Compute:
        tensors = 3 if self.model.gated else 2  # tensors that the kernel reads or writes
        return self._pass(self.recipe.element * self.tokens * tensors * self.model.hidden // self.tensor, "activation")

    def _norm(self) -> Compute:
        return self._pass(2 * self.local_stream, "norm")

    def _norm_backward(self) -> Compute:
        return self._pass(5 * self.local_stream, "norm", "backward")  # dx: 3; the weight's gradient reads 2 again

    def _add(self) -> Compute:
        """Return the addition to the stream. In Megatron, this kernel also applies bias and dropout."""
        mask = self.local_stream / self.recipe.element if self.recipe.dropout else 0
        return self._pass(3 * self.local_stream + mask, "add")

    def _add_backward(self) -> Compute:
        extra = 0.0 if self.model.gated else self.local_stream  # for the gradient of the bias
        if self.recipe.dropout:
            extra += 2 * self.local_stream + self.local_stream / self.recipe.element
        return self._pass(3 * self.local_stream + extra, "add", "backward")

    def _dropout(self, phase: str) -> list[Event]:
        return [self._pass(2.5 * self.local_stream, "dropout", phase)] if self.recipe.dropout else []

    def _gather(self, phase: str, handle: int | None = None) -> list[Event]:
        return self._send("all_gather", self.local_stream, phase, handle) if self.recipe.sequence else []

    def _scatter(self, phase: str, handle: int | None = None) -> list[Event]:
        if self.recipe.sequence:
            return self._send("reduce_scatter", self.local_stream, phase, handle)
        return self._send("all_reduce", self.stream, phase, handle)

    def _send(self, op: str, payload: float, phase: str, handle: int | None = None) -> list[Event]:
        return [] if self.tensor == 1 else [Collective(op, payload, self.ranks, phase, TENSOR, handle=handle)]

    # Products

    def _product(
        self, shape: tuple[int, int, int], phase: str, label: str, out: float | None = None, batch: int = 1
    ) -> Compute:
        """Return a matrix product. out: bytes that it writes; by default the size of its result."""
        (m, n, k), e = shape, self.recipe.element * batch
        written = e * m * n if out is None else out
        return Compute(2 * batch * m * n * k, e * (m * k + k * n) + written, shape, batch, phase=phase, label=label)

    def _product_backward(
        self, shape: tuple[int, int, int], label: str, enters: bool = False, leaves: bool = False
    ) -> list[Event]:
        """Return the backward of y = x W: dx = dy Wᵀ and dW = xᵀ dy.

        enters: x enters a tensor-parallel region. leaves: y leaves one. With sequence parallelism, backward gathers dy
        if y leaves, and gathers x again if x enters. If the recipe overlaps, it gathers x while dx is computed, and
        scatters dx while dW is computed.
        """
        m, n, k = shape  # tokens, out, in
        b = self.recipe
        dx = self._product((m, k, n), "backward", f"d {label}")
        # Accumulate over micro-batches: in the product itself, or in a separate pass.
        traffic = 2 * b.gradient * n * k if b.fused_accumulation else b.element * n * k
        events: list[Event] = [self._product((k, n, m), "backward", f"d {label} weight", traffic)]
        if not b.fused_accumulation:
            events.append(self._pass((b.element + 2 * b.gradient) * n * k, "accumulate", "backward"))
        before = self._gather("backward") if leaves else []
        if not enters or self.tensor == 1:
            return [*before, dx, *events]
        if not b.overlap_tensor:
            return [*before, *self._gather("backward"), dx, *self._scatter("backward"), *events]
        gather = self._gather("backward", 1)
        return [
            *before, *gather, dx, *([Wait(1)] if gather else []), *self._scatter("backward", 2), *events, Wait(2),
        ]  # fmt: skip


def _repeated(event: Event) -> Event:
    return replace(event, phase="recompute") if isinstance(event, Compute | Collective) else event
