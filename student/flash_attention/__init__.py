"""FlashAttention-2, from online softmax to a fused kernel."""
