"""Which dtype is what under autocast: predicted from the rules, without running the model."""

import warnings
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


_PRODUCTS = (nn.Linear, nn.Conv1d)
_SENSITIVE = (nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.Softplus)  # exponentials and long sums


def dtype_table(
    model: nn.Sequential, inputs: torch.dtype, loss: nn.Module, *, autocast: torch.dtype | None, device: str
) -> DtypeTable:
    """The dtypes of a training step, predicted: nothing is run.

    model: a chain of Linear, Conv1d, Embedding, LayerNorm, GroupNorm, Softmax, LogSoftmax, Softplus, ReLU, GELU, SiLU,
    Tanh, Sigmoid, Dropout and Identity, its parameters of one dtype. inputs: of what goes in (int64 for an Embedding).
    loss: CrossEntropyLoss or MSELoss, of the last activation and an int64 or float32 target. autocast: None, or the
    dtype of `torch.autocast(device, dtype)` around model and loss; device: "cuda" or "cpu", whose lists of operators
    differ:

    - products (Linear, Conv1d) run and return in autocast's dtype, on both;
    - on "cuda", LayerNorm, GroupNorm, Softmax, LogSoftmax and Softplus run and return in float32; on "cpu" they keep
      their input's dtype;
    - losses run in float32, on both; everything else keeps its input's dtype.

    Without autocast all keep their input's dtype, which is then the parameters'; MSELoss against float32 is promoted.
    Source: PyTorch documentation, "Automatic Mixed Precision: CUDA and CPU op-specific behavior".
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    width = next((w for m in model for w in (getattr(m, "in_features", 0), getattr(m, "embedding_dim", 0),
                                             (getattr(m, "normalized_shape", None) or [0])[-1]) if w), 8)
    device = device if device == "cpu" else "cuda"
    own = {name: p.dtype for name, p in model.named_parameters()}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.zeros((2, 3) if inputs == torch.int64 else (2, 3, width), dtype=inputs, device=device)
        activations = {}
        torch.set_autocast_enabled(device, autocast is not None)
        torch.set_autocast_dtype(device, autocast or torch.bfloat16)
        try:
            for name, layer in model.named_children():
                twin = object.__new__(type(layer))
                twin.__dict__ = {**layer.__dict__, "_parameters": {
                    n: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), False)
                    for n, p in layer._parameters.items()
                }}
                x = type(layer).forward(twin, x)
                activations[name] = x.dtype
            target = (torch.zeros(2, 3, x.shape[-1], device=device) if isinstance(loss, nn.MSELoss)
                      else torch.zeros(2, x.shape[-1], dtype=torch.int64, device=device))
            value = type(loss).forward(loss, x, target).dtype
        finally:
            torch.set_autocast_enabled(device, False)
    return DtypeTable(own, activations, value, dict(own))
