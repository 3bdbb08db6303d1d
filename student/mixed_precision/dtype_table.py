"""Which dtype is what under autocast: predicted from the rules, without running the model."""

from dataclasses import dataclass

import torch
from torch import nn

from lab.provided import provided


@provided
@dataclass(frozen=True)
class DtypeTable:
    """Names as in the model: parameters and gradients by `named_parameters`, activations by `named_children`."""

    parameters: dict[str, torch.dtype]
    activations: dict[str, torch.dtype]  # what each child returns
    loss: torch.dtype
    gradients: dict[str, torch.dtype]  # .grad of each parameter, after backward


def dtype_table(
    model: nn.Sequential, inputs: torch.dtype, loss: nn.Module, *, autocast: torch.dtype | None, device: str
) -> DtypeTable:
    """The dtypes of a training step, predicted: nothing is run.

    model: a chain of Linear, Conv1d, Embedding, LayerNorm, GroupNorm, Softmax, LogSoftmax, Softplus, ReLU, GELU, SiLU,
    Tanh, Sigmoid, Dropout and Identity, its parameters of one dtype. inputs: of what goes in (int64 for an Embedding).
    loss: CrossEntropyLoss or MSELoss, of the last activation and an int64 or float32 target. autocast: None, or the
    dtype of `torch.autocast(device, dtype)` around model and loss; device: "cuda" or "cpu", whose lists of operators
    differ:

    - what multiplies matrices runs and returns in autocast's dtype, on both;
    - on "cuda", what sums over a row, or takes a logarithm or an exponential that can overflow, runs and returns in
      float32; on "cpu" it keeps its input's dtype;
    - losses run in float32, on both; everything else keeps its input's dtype.

    Without autocast all keep their input's dtype, which is then the parameters'; MSELoss against float32 is promoted.
    Source: PyTorch documentation, "Automatic Mixed Precision: CUDA and CPU op-specific behavior".
    """
    raise NotImplementedError("mixed_precision.dtype_table: The dtypes of a training step, predicted")
