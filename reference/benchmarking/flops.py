"""The FLOPs of a transformer, layer by layer, without running it."""

from dataclasses import dataclass

from lab.model.transformer import Config
from lab.provided import provided


@provided
@dataclass(frozen=True)
class Flops:
    """FLOPs of one layer in one step, over all blocks and the whole batch."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def flops(config: Config, *, batch: int, context: int) -> dict[str, Flops]:
    """Return the FLOPs of the matrix products of `lab.model.transformer.Transformer(config)`, forward and backward.

    batch, context: shape of the tokens. The keys are "q_proj", "k_proj", "v_proj", "scores" (q kᵀ), "values" (p v),
    "o_proj", "gate_proj", "up_proj", "down_proj", each summed over all blocks, and "head". A product of (m, k) and
    (k, n) counts 2·m·k·n. Causal attention counts half of the full matrix. Pointwise operations and lookups count 0.
    Backward has two products of the same size for each product of forward: one for the gradient of each factor.
    Example: GPT-2's size ("small"), batch 1, context 1024, needs 272.4 GFLOP forward; scores and values are 19.3 of it.
    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
    """
    tokens = batch * context
    kv_width = config.kv_heads * config.dim

    def linear(rows: int, columns: int) -> int:
        return 2 * tokens * rows * columns

    square = 2 * batch * config.heads * context**2 * config.dim // 2  # half of it is masked
    block = {
        "q_proj": linear(config.width, config.width),
        "k_proj": linear(config.width, kv_width),
        "v_proj": linear(config.width, kv_width),
        "scores": square,
        "values": square,
        "o_proj": linear(config.width, config.width),
        "gate_proj": linear(config.width, config.hidden),
        "up_proj": linear(config.width, config.hidden),
        "down_proj": linear(config.hidden, config.width),
    }
    forward = {name: config.layers * count for name, count in block.items()}
    forward["head"] = linear(config.width, config.vocabulary)
    return {name: Flops(count, 2 * count) for name, count in forward.items()}
