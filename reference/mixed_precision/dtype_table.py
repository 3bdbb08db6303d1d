"""Dtypes under autocast, predicted from its rules without running the model."""

from dataclasses import dataclass

import torch
from torch import nn

from lab.provided import provided


@provided
@dataclass(frozen=True)
class DtypeTable:
    """Dtypes by name: parameters and gradients as in `named_parameters`, activations as in `named_children`."""

    parameters: dict[str, torch.dtype]
    activations: dict[str, torch.dtype]  # what each child returns
    loss: torch.dtype
    gradients: dict[str, torch.dtype]  # .grad of each parameter, after backward


_PRODUCTS = (nn.Linear, nn.Conv1d)
_SENSITIVE = (nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.Softplus)  # exponentials and long sums


def dtype_table(
    model: nn.Sequential, inputs: torch.dtype, loss: nn.Module, *, autocast: torch.dtype | None, device: str
) -> DtypeTable:
    """Predict the dtypes of a training step; nothing runs.

    model: a chain of Linear, Conv1d, Embedding, LayerNorm, GroupNorm, Softmax, LogSoftmax, Softplus, ReLU, GELU, SiLU,
    Tanh, Sigmoid, Dropout and Identity, with parameters of one dtype. inputs: dtype of the input (int64 for an
    Embedding). loss: CrossEntropyLoss or MSELoss, of the last activation and an int64 or float32 target. autocast:
    None, or the dtype of `torch.autocast(device, dtype)` around model and loss. device: "cuda" or "cpu"; their lists of
    operators differ:

    - on both, layers that multiply matrices run and return in autocast's dtype;
    - on "cuda", layers that sum over a row, or take a logarithm or an exponential that can overflow, run and return in
      float32; on "cpu" they keep the dtype of their input;
    - on both, losses run in float32. Everything else keeps the dtype of its input.

    Without autocast every layer keeps the dtype of its input, which is that of the parameters. MSELoss against a
    float32 target promotes to float32.
    Source: PyTorch documentation, "Automatic Mixed Precision: CUDA and CPU op-specific behavior".
    """
    parameters = {name: p.dtype for name, p in model.named_parameters()}
    activations = {}
    current = inputs
    for name, layer in model.named_children():
        if isinstance(layer, nn.Embedding):  # a lookup: no arithmetic, and ids have no dtype to keep
            current = layer.weight.dtype
        elif autocast is not None and isinstance(layer, _PRODUCTS):
            current = autocast
        elif autocast is not None and device == "cuda" and isinstance(layer, _SENSITIVE):
            current = torch.float32
        activations[name] = current
    promoted = autocast is not None or isinstance(loss, nn.MSELoss)
    # Autocast casts weights on the way in; their gradients are cast back on the way out.
    return DtypeTable(parameters, activations, torch.float32 if promoted else current, dict(parameters))
