"""Where the memory of a training step goes: counted from the sizes alone."""

from dataclasses import dataclass
from typing import Literal

from lab.model.transformer import Config
from lab.provided import provided


@provided
@dataclass(frozen=True)
class Account:
    """Bytes of a training step on one device."""

    parameters: int  # what the model computes with
    gradients: int  # of the parameters, at the end of backward
    optimizer: int  # AdamW's two moments, and float32 master weights where the model's are smaller
    activations: int  # the most that autograd keeps for backward at one time

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def accounting(
    config: Config,
    *,
    batch: int,
    context: int,
    precision: Literal["float32", "bfloat16"],
    segment: int | None = None,
) -> Account:
    """Bytes of one step of AdamW on `lab.model.transformer.Transformer(config)`, its attention the plain one.

    batch, context: of the tokens. precision: "float32"; or "bfloat16": weights and gradients in bfloat16, as
    `mixed_step` has them, with float32 masters. segment: None keeps everything for backward; a number checkpoints the
    blocks in segments of that many (the last may have fewer): of each only the input is kept, and backward recomputes
    one segment at a time.

    Kept for backward, each storage once, parameters and what is independent of the batch left out, with s bytes an
    element (4 or 2) and T = batch · context tokens:

    - a norm: its input in float32, one float32 number a token, the normalised input and the result (which the products
      behind it share);
    - attention, every head of keys and values repeated to `heads`: q, k, v, the probabilities (batch, heads, context,
      context), o; one bool of causal mask for each (query, key), in every block;
    - SwiGLU: gate, silu(gate), up and their product;
    - the embedding: token ids (int64); the loss: targets (int64) and log-probabilities in float32.

    In float32 a norm's input is the residual stream itself: the first norm of a segment keeps what is the segment's
    kept input. Backward frees as it goes: the loss and the final norm are gone before the last segment is recomputed,
    and that one, its kept input too, before the one before it.
    GPT-2's size ("small" in lab.model.transformer), batch 8, context 1024, float32: 2.4 GiB for parameters, gradients
    and optimizer, 11.9 GiB of activations; with segment=1, 1.9 GiB of activations.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1.
    """
    raise NotImplementedError(
        "mixed_precision.accounting: Bytes of one step of AdamW on `lab.model.transformer.Transformer(config)`, its …"
    )
