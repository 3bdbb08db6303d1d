"""Provides get_flashattention_autograd_function_triton, on inputs that claim to be on a GPU."""

from ..fork import supplied
from .adapted import function

supplied.pretend_cuda()
FlashAttention = function("flash_attention.triton_forward", "triton")
