"""get_flashattention_autograd_function_triton, unchanged."""

from ..fork import supplied
from .adapted import function

supplied.call_it_cuda()
FlashAttention = function("flash_attention.triton_forward", "triton")
