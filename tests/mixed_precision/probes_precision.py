"""Probes of precision: sums, dtypes, scaled gradients, and whole training runs in 16 bits."""

import contextlib
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.harness import modes
from lab.harness.callers import CallerTensors
from lab.harness.calls import plain
from lab.harness.named import Named, plain_name
from lab.harness.raising import without_models
from lab.model.transformer import Config, Transformer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}


def added(impl: Any, function: str, values: Tensor, accumulator: str) -> dict:
    """The result of `accumulate` or `error_bound`."""
    caller = CallerTensors(values=values)
    found = getattr(impl.mixed_precision.accumulate, function)(values, DTYPES[accumulator])
    return {"found": found, "callers": caller.seen()}


# ---- dtypes ----

LAYERS = {
    "linear": lambda width: nn.Linear(width, width),
    "conv": lambda width: nn.Conv1d(3, 3, 3, padding=1),
    "layer_norm": lambda width: nn.LayerNorm(width),
    "group_norm": lambda width: nn.GroupNorm(3, 3),
    "softmax": lambda width: nn.Softmax(-1),
    "log_softmax": lambda width: nn.LogSoftmax(-1),
    "softplus": lambda width: nn.Softplus(),
    "relu": lambda width: nn.ReLU(),
    "gelu": lambda width: nn.GELU(),
    "silu": lambda width: nn.SiLU(),
    "tanh": lambda width: nn.Tanh(),
    "sigmoid": lambda width: nn.Sigmoid(),
    "dropout": lambda width: nn.Dropout(0.1),
    "identity": lambda width: nn.Identity(),
    "embedding": lambda width: nn.Embedding(7, width),
}
LOSSES = {"cross_entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss}
WIDTH = 8


def chain(layers: list[str], parameters: str) -> nn.Sequential:
    """A chain of these layers, for inputs of shape (batch, 3, width)."""
    model = nn.Sequential()
    for i, kind in enumerate(layers):
        model.add_module(f"{kind}_{i}", LAYERS[kind](WIDTH))
    return model.to(DTYPES[parameters])


def predicted(
    impl: Any, layers: list[str], parameters: str, loss: str, autocast: str, device: str, runs: bool = True
) -> dict:
    """Result of `dtype_table`; runs: whether the model's layers can be executed."""
    model = chain(layers, parameters)
    for kind in () if runs else {type(layer) for layer in (*model.modules(), LOSSES[loss]())}:
        kind.forward = _refuse
    inputs = torch.int64 if layers[0] == "embedding" else DTYPES[parameters]
    table = impl.mixed_precision.dtype_table.dtype_table(
        model, inputs, LOSSES[loss](), autocast=DTYPES.get(autocast), device=device
    )
    tables = {name: _names(getattr(table, name)) for name in ("parameters", "activations", "gradients")}
    return {**tables, "loss": _name(table.loss)}


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("this layer cannot be run: dtypes follow from the rules alone")


def observed(impl: Any, layers: list[str], parameters: str, loss: str, autocast: str, device: str) -> dict:
    """Dtypes observed in a run. For "cuda" it runs on fake tensors, even where there is a GPU. Does not call impl."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = device == "cuda"
    model = chain(layers, parameters)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext(),
        torch.set_grad_enabled(not fake), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        for module in model if fake else ():
            for name, p in list(module._parameters.items()):
                on_fakes = torch.empty(p.shape, dtype=p.dtype, device="cuda")
                setattr(module, name, nn.Parameter(on_fakes, requires_grad=False))
        torch.set_autocast_enabled(device, autocast in DTYPES)  # torch.autocast would require the device
        torch.set_autocast_dtype(device, DTYPES.get(autocast, torch.float16))
        ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
        x = ids if layers[0] == "embedding" else torch.zeros(2, 3, WIDTH, dtype=DTYPES[parameters], device=device)
        activations = {}
        for name, layer in model.named_children():
            x = layer(x)
            activations[name] = _name(x.dtype)
        classes = torch.zeros(2, WIDTH, dtype=torch.int64, device=device)  # classes are dim 1 of x
        value = LOSSES[loss]()(x, torch.zeros(2, 3, WIDTH, device=device) if loss == "mse" else classes)
        torch.set_autocast_enabled(device, False)
    if x.requires_grad:  # a chain may have no parameters; MSELoss's backward cannot promote in torch 2.11
        x.backward(torch.ones_like(x))
    names = {n: _name(p.dtype) for n, p in model.named_parameters()}
    gradients = names if fake else {n: _name(p.grad.dtype) for n, p in model.named_parameters() if p.grad is not None}
    return {"parameters": names, "activations": activations, "gradients": gradients, "loss": _name(value.dtype)}


def _names(table: Any) -> dict[str, str]:
    return {str(name): _name(dtype) for name, dtype in dict(table).items()}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# ---- loss scaling ----


def scaler_scales(impl: Any, options: dict, finite: list[bool], resume_at: int) -> list[float]:
    """The scale before the first step and after each; saved and restored into a new scaler at `resume_at`."""
    scaler = impl.mixed_precision.loss_scaler.LossScaler(**options)
    scales = [float(scaler.scale)]
    for i, ok in enumerate(finite):
        if i == resume_at:
            state = scaler.state_dict()
            scaler = impl.mixed_precision.loss_scaler.LossScaler(**{**options, "scale": 3.0})
            scaler.load_state_dict(state)
        scaler.update(ok)
        scales.append(float(scaler.scale))
    return scales


def scaled_loss(impl: Any, loss: Tensor, scale: float) -> tuple[Tensor, bool]:
    """The scaled loss, and whether it requires a gradient."""
    scaled = impl.mixed_precision.loss_scaler.LossScaler(scale).scale_loss(loss.requires_grad_())
    return scaled.detach(), scaled.requires_grad


def unscaled(impl: Any, gradients: list, scale: float) -> dict:
    """The tensors after `unscale`, and its return value."""
    scaler = impl.mixed_precision.loss_scaler.LossScaler(scale)
    finite = scaler.unscale(gradients)
    return {"finite": finite, "gradients": gradients, "scale": float(scaler.scale)}


# ---- steps ----


class Net(Named):
    """Two linear layers with a tanh between, and an unused parameter. state: by plain names."""

    def __init__(self, state: dict[str, Tensor]):
        (hidden, width), (outputs, _) = state["first.weight"].shape, state["second.weight"].shape
        super().__init__(
            (width, hidden),
            first=nn.Linear(width, hidden),
            second=nn.Linear(hidden, outputs),
            unused=nn.Linear(3, 1, bias=False),
        )
        self.load_state_dict({name: state[plain_name(name)] for name in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def squares(model: nn.Module, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Mean squared error in float32, times `weight`; a small weight makes gradients underflow in float16."""
    return (model(x).float() - y).square().mean() * weight


def train(impl: Any, state: dict, batches: list, weights: list[float], options: dict) -> dict:
    """Train with `mixed_step`: masters after each step, its return values, and observations."""
    module = impl.mixed_precision.mixed_step
    model = Net(state).to(DTYPES[options["dtype"]])
    changed = modes.put(model, training=len(batches) % 2 == 0)
    masters = module.master_weights(model)
    optimizer = OPTIMIZERS[options["optimizer"]](masters, options["lr"])
    scaler = impl.mixed_precision.loss_scaler.LossScaler(options["scale"], interval=options["interval"])
    seen: dict[str, Any] = {"forwards": 0, "compute": set(), "leftover": []}

    def watch(layer: nn.Module, args: Any, output: Tensor) -> None:
        seen["forwards"] += 1
        seen["compute"].add(str(output.dtype))

    model.first.register_forward_hook(watch)
    reports, history, scales, parameters = [], [], [], []
    for (x, y), weight in zip(batches, weights, strict=True):
        x = x.to(DTYPES[options["dtype"]])
        step = module.mixed_step(
            model, masters, optimizer, scaler,
            lambda m, x=x, y=y, weight=weight: squares(m, x, y, weight),
            max_norm=options["max_norm"],
        )  # fmt: skip
        reports.append({"loss": float(step.loss), "norm": float(step.gradient_norm), "stepped": step.stepped})
        history.append([m.detach().clone() for m in masters])
        parameters.append([p.detach().clone() for p in model.parameters()])
        scales.append(float(scaler.scale))
        seen["leftover"].append(sum(p.grad is not None and bool(p.grad.any()) for p in (*model.parameters(), *masters)))
    counts = [int(s["step"]) for s in optimizer.state.values() if "step" in s]
    return {
        "reports": reports, "masters": history, "parameters": parameters, "scales": scales, "counts": counts,
        "modes": changed(), **seen, "compute": sorted(seen["compute"]),
        "held": [str(p.dtype) for g in optimizer.param_groups for p in g["params"]],
    }  # fmt: skip


OPTIMIZERS = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=1e-10),
}


# ---- where the memory goes ----


class SavedTracker:
    """Tracks the bytes that autograd saves, counting each storage once. left_out: tensors that do not count."""

    def __init__(self, left_out: list[Tensor]):
        self.left_out = {t.untyped_storage()._cdata for t in left_out}
        self.handles: dict[int, int] = {}
        self.live = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self.left_out:
            return tensor
        return _Handle(self, tensor)

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        return packed.tensor if isinstance(packed, _Handle) else packed

    def count(self, tensor: Tensor, change: int) -> None:
        storage = tensor.untyped_storage()
        before = self.handles.get(storage._cdata, 0)
        self.handles[storage._cdata] = before + change
        if before == 0 or before + change == 0:
            self.live += change * storage.nbytes()
        self.peak = max(self.peak, self.live)


class _Handle:
    def __init__(self, tracker: SavedTracker, tensor: Tensor):
        self.tracker, self.tensor = tracker, tensor
        tracker.count(tensor, +1)

    def __del__(self) -> None:
        self.tracker.count(self.tensor, -1)


def accounted(
    impl: Any, sizes: dict, batch: int, context: int, precision: str, segment: int | None, on_paper: bool = False
) -> dict:
    """Result of `accounting`. on_paper: creating a module raises."""
    count, config = impl.mixed_precision.accounting.accounting, Config(**sizes)
    with without_models() if on_paper else contextlib.nullcontext():
        return plain(count(config, batch=batch, context=context, precision=precision, segment=segment))


def measured(impl: Any, sizes: dict, batch: int, context: int, precision: str, segment: int | None) -> dict:
    """The counts of `accounting`, measured in a run. Does not call impl."""
    config = Config(**sizes)
    model = Transformer(config).to(DTYPES[precision])
    masters = model if precision == "float32" else Transformer(config)
    optimizer = torch.optim.AdamW(masters.parameters())
    tokens, targets = torch.randint(config.vocabulary, (2, batch, context)).unbind()
    tokens, targets = tokens.clone(), targets.clone()
    tracker = SavedTracker([*model.parameters(), *model.buffers()])
    with torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack):
        x = model.embedding(tokens)
        blocks, size = [*model.blocks], segment or 1
        for first in range(0, config.layers, size):
            part = functools.partial(_through, blocks[first : first + size], model.cos[:context], model.sin[:context])
            x = part(x) if segment is None else checkpoint(part, x, use_reentrant=True)
        logits = model.head(model.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        del x, logits
        after_forward = tracker.live
        loss.backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    for master in masters.parameters():
        master.grad = torch.zeros_like(master)
    optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for n, t in s.items() if n != "step")
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": gradients,
        "optimizer": state + (sum(p.nbytes for p in masters.parameters()) if masters is not model else 0),
        "activations": tracker.peak,
        "after_forward": after_forward,
    }


def _through(blocks: list, cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, cos, sin)
    return x
