"""Provides get_flashattention_autograd_function_pytorch, unchanged."""

from .adapted import function

TiledAttention = function("flash_attention.tiled_forward", "pytorch")
