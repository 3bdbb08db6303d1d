"""How many FLOPs a transformer needs, layer by layer, before it is ever run."""

from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.model.transformer import Config, Transformer
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
    """FLOPs of the matrix products of `lab.model.transformer.Transformer(config)`, forward and backward.

    batch, context: of the tokens. The keys are "q_proj", "k_proj", "v_proj", "scores" (q kᵀ), "values" (p v), "o_proj",
    "gate_proj", "up_proj", "down_proj", each summed over all blocks, and "head". By the conventions a product of (m, k)
    and (k, n) is 2·m·k·n, causal attention counts half of its whole matrix; pointwise work and lookups count nothing.
    Backward is two products for each of forward's, of the same size: one for each factor's gradient.
    GPT-2's size ("small"), batch 1, context 1024: 272.4 GFLOP forward, of which scores and values are 19.3.
    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
    """
    counts = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func._overloadpacket.__name__ in ("mm", "bmm"):
                counts.append(2 * args[0].numel() * args[1].shape[-1])
            return out

    one = replace(config, layers=1)
    with torch.device("meta"):
        model = Transformer(one)
        tokens = torch.zeros(batch, context, dtype=torch.int64)
    with Products(), torch.no_grad():
        model(tokens)
    names = ("q_proj", "k_proj", "v_proj", "scores", "values", "o_proj", "gate_proj", "up_proj", "down_proj", "head")
    assert len(counts) == len(names), counts
    forward = {n: c * (config.layers if n != "head" else 1) // (2 if n in ("scores", "values") else 1)
               for n, c in zip(names, counts, strict=True)}
    return {name: Flops(count, 2 * count) for name, count in forward.items()}
