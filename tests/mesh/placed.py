"""Draws a mesh and the whole tensors of a model on it; trains them in one process."""

import torch


def shapes_of(layout: dict) -> dict:
    """Return shapes by name, one per way of sharding: rows, columns, not sharded, experts, vocabulary."""
    c = layout["config"]
    width, hidden = c["width"], c["hidden"]
    shapes = {"embedding.weight": (c["vocabulary"], width)}
    for layer in range(layout["layers"]):
        block = f"blocks.{layer}"
        shapes |= {f"{block}.norm.weight": (width,), f"{block}.up.weight": (hidden, width),
                   f"{block}.down.weight": (width, hidden)}  # fmt: skip
        if layout["experts"]:
            shapes[f"{block}.mlp.router.weight"] = (layout["experts"], width)
        for expert in range(layout["experts"]):
            shapes[f"{block}.mlp.experts.{expert}.up.weight"] = (hidden, width)
            shapes[f"{block}.mlp.experts.{expert}.down.weight"] = (width, hidden)
    shapes["norm.weight"] = (width,)
    if not layout["tied"]:
        shapes["head.weight"] = (c["vocabulary"], width)
    return shapes


def draw_layout(rng, degrees: dict, *, experts: int = 0, tied: bool = False, small: int | None = None) -> dict:
    """Draw sizes that up to 4 tensor ranks divide; the vocabulary needs padding."""
    config = {
        "layers": 2, "width": 12, "heads": 2, "kv_heads": 1, "hidden": 12 * rng.integers(1, 2),
        "vocabulary": rng.choice([7, 9, 10, 13]), "context": 4,
    }  # fmt: skip
    return {"degrees": degrees, "config": config, "layers": 2, "experts": experts, "tied": tied, "small": small}


def draw_values(rng, layout: dict) -> dict:
    return {name: rng.normal(*shape) for name, shape in shapes_of(layout).items()}


def one_process(name: str, options: dict, values: dict, gradients: list, dtype: torch.dtype) -> dict:
    """Train in one process without interruption, one step per entry of `gradients`.

    Returns {key of the optimizer's state: {name: tensor}}; the key of the parameters is "".
    """
    parameters = {n: torch.nn.Parameter(v.to(dtype, copy=True)) for n, v in values.items()}
    optimizer = getattr(torch.optim, name)(parameters.values(), **options)
    for grads in gradients:
        for n, parameter in parameters.items():
            parameter.grad = grads[n].to(dtype) if n in grads else None
        optimizer.step()
    state: dict = {"": {n: p.detach() for n, p in parameters.items()}}
    for n, p in parameters.items():
        for key, value in optimizer.state.get(p, {}).items():
            if key != "step":
                state.setdefault(key, {})[n] = value
    return state
