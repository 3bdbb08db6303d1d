"""Where the memory of a training step goes, counted from the sizes alone."""

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
    """Return the bytes of one AdamW step on `lab.model.transformer.Transformer(config)` with plain attention.

    batch, context: shape of the tokens. precision: "float32", or "bfloat16" for weights and gradients in bfloat16 with
    float32 masters, as in `mixed_step`. segment: None keeps everything for backward. A number checkpoints the blocks in
    segments of that many blocks (the last may have fewer): only a segment's input is kept, and backward recomputes one
    segment at a time.

    Activations are the storages kept for backward, each counted once, without parameters and rotary tables. An element
    takes s bytes (4 or 2), and there are T = batch · context tokens:

    - norm: its input in float32, one float32 number per token, the normalised input, and the result (which the products
      after it share);
    - attention, with keys and values repeated to `heads`: q, k, v, the probabilities (batch, heads, context, context),
      o, and one bool of causal mask per (query, key), in every block;
    - SwiGLU: gate, silu(gate), up and their product;
    - embedding: token ids (int64). Loss: targets (int64) and log-probabilities in float32.

    In float32, a norm's input is the residual stream itself, so the first norm of a segment shares the segment's kept
    input. Backward frees memory as it goes. It frees the loss and the final norm, then recomputes the last segment. It
    frees that segment and its kept input before it recomputes the previous segment.
    Example: GPT-2's size ("small" in lab.model.transformer), batch 8, context 1024, float32, takes 2.4 GiB for
    parameters, gradients and optimizer, and 11.9 GiB of activations; with segment=1, 1.9 GiB of activations.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1.
    """
    raise NotImplementedError("mixed_precision.accounting: Return the bytes of one AdamW step on …")
