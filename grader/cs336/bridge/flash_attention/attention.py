"""get_flashattention_autograd_function_triton, unchanged."""

from ..fork import supplied
from .adapted import function

supplied.pretend_cuda()
FlashAttention = function("flash_attention.triton_forward", "triton")
