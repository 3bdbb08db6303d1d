"""A decoder-only transformer as of 2025: RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases.

It is plain on purpose: every operator is one line, and nothing is fused. A stage passes its own attention as `attend`:
annotated, tiled or sharded. Sources: Touvron et al. 2023 (Llama), Su et al. 2021 (RoPE),
Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped-query attention).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a transformer. Raises ValueError unless 2 · heads divides width, and kv_heads divides heads."""

    layers: int = 4
    width: int = 128  # of the residual stream
    heads: int = 4  # of queries; dim = width / heads
    kv_heads: int = 2  # of keys and values; heads is a multiple of it
    hidden: int = 344  # of SwiGLU
    vocabulary: int = 256
    context: int = 256  # longest sequence

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"expected width a multiple of 2 x heads (RoPE turns pairs) and heads a multiple of kv_heads, "
                f"got width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}"
            )

    @property
    def dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads


# The sizes of Brown et al. 2020 (GPT-3), table 2.1, as this architecture, and one for a laptop.
SIZES = {
    "tiny": Config(layers=2, width=64, heads=4, kv_heads=2, hidden=176, vocabulary=256, context=256),
    "small": Config(layers=12, width=768, heads=12, kv_heads=12, hidden=2048, vocabulary=50304, context=1024),
    "medium": Config(layers=24, width=1024, heads=16, kv_heads=16, hidden=2736, vocabulary=50304, context=1024),
    "large": Config(layers=24, width=1536, heads=16, kv_heads=16, hidden=4096, vocabulary=50304, context=1024),
    "xl": Config(layers=24, width=2048, heads=16, kv_heads=16, hidden=5472, vocabulary=50304, context=2048),
    "2.7b": Config(layers=32, width=2560, heads=32, kv_heads=32, hidden=6832, vocabulary=50304, context=2048),
}

# 7b: Touvron et al. 2023, "Llama 2", section 2 and its model card. The others: Grattafiori et al. 2024, "The Llama 3
# Herd of Models", table 3; context is that of most of pre-training, section 3.4.1. Heads are not tied to embeddings.
MODELS = {
    **SIZES,
    "7b": Config(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocabulary=32000, context=4096),
    "8b": Config(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocabulary=128256, context=8192),
    "70b": Config(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256, context=8192),
    "405b": Config(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, vocabulary=128256, context=8192),
}

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """softmax(q kᵀ / √dim) v, with the full matrix of scores. q (…, queries, dim), k and v (…, keys, dim)."""
    scores = q @ k.mT / q.shape[-1] ** 0.5  # (…, queries, keys)
    if is_causal:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(after, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v  # (…, queries, dim)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dim, computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (x32 * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn each pair (x[i], x[i + dim/2]) by its position's angle. x (batch, heads, context, dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with fewer heads of keys and values than of queries."""

    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.config, self.attend = config, attend
        kv_width = config.kv_heads * config.dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, context, _ = x.shape
        q, k, v = (
            project(x).view(batch, context, -1, self.config.dim).transpose(1, 2)  # (batch, heads, context, dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = self.config.heads // self.config.kv_heads
        if group > 1:
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        o = self.attend(q, k, v, True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and with a residual connection."""

    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, attend)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Token ids (batch, context) in, logits (batch, context, vocabulary) out. The head is not tied to the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, attend: Attend = attention):
        """attend: attend(q, k, v, is_causal), as `attention` here; q, k and v (batch, heads, context, dim)."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        angles = torch.outer(
            torch.arange(config.context, dtype=torch.float32),
            10_000.0 ** (-torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim),
        )  # (context, dim / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        context = tokens.shape[1]
        if context > self.config.context:
            raise ValueError(f"expected at most {self.config.context} tokens, got {context}")
        x = self.embedding(tokens)  # (batch, context, width)
        for block in self.blocks:
            x = block(x, self.cos[:context], self.sin[:context])
        return self.head(self.norm(x))  # (batch, context, vocabulary)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the targets (batch, context), in float32."""
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    def _initialise(self, module: nn.Module) -> None:
        """Normal with std 0.02; layers that write to the residual stream have 0.02 / √(2 · layers)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Attention | SwiGLU):
            last = module.o_proj if isinstance(module, Attention) else module.down_proj
            nn.init.normal_(last.weight, std=0.02 / (2 * self.config.layers) ** 0.5)
