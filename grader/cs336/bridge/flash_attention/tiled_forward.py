"""get_flashattention_autograd_function_pytorch, as it is."""

from .adapted import function

TiledAttention = function("flash_attention.tiled_forward", "pytorch")
