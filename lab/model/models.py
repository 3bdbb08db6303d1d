"""Models by name, as `lab.model.transformer.Config` has them: public sizes, each with its source."""

from __future__ import annotations

from .transformer import SIZES, Config

# 7b: Touvron et al. 2023, "Llama 2", section 2 and its model card. The others: Grattafiori et al. 2024, "The Llama 3
# Herd of Models", table 3; context is that of most of pre-training, section 3.4.1. Heads are not tied to embeddings.
MODELS = {
    **SIZES,
    "7b": Config(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocabulary=32000, context=4096),
    "8b": Config(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocabulary=128256, context=8192),
    "70b": Config(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256, context=8192),
    "405b": Config(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, vocabulary=128256, context=8192),
}
