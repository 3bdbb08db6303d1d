"""What is drawn for tensor parallelism, and the whole layer in one process that the ranks' parts are held to."""

from __future__ import annotations

import torch
from torch import nn

from lab.judge import close, measured
from lab.model.transformer import Config, Transformer
from lab.world.cluster import sent_bytes

from . import probes_tensor as probes
from .suspects_tensor import of_half

CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1,
       "embedding": 0, "head": 0}  # fmt: skip


def draw_groups(rng, size: int) -> tuple[int, list]:
    """(world, groups) in which groups of `size` ranks are not the world, and group ranks not global ranks."""
    order = rng.shuffled(range(2 * size))
    return 2 * size, [sorted(order[:size]), sorted(order[size:])]


def members(world: int, groups: list) -> list:
    return groups or [list(range(world))]


def draw_sizes(rng, world: int) -> dict:
    """Of a transformer that `world` ranks divide, no two sizes alike."""
    kv_heads = world * rng.integers(1, 2)
    heads = kv_heads * rng.integers(2, 3)
    return {
        "layers": 1,
        "width": 2 * heads * rng.integers(1, 2),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": world * rng.integers(2, 5),
        "vocabulary": world * rng.integers(3, 5) + rng.integers(0, world - 1),
        "context": world * rng.integers(2, 3),
    }


def draw_state(rng, sizes: dict) -> dict:
    """Weights large enough that every part counts; norms differ from 1."""
    state = Transformer(Config(**sizes)).state_dict()
    return {n: rng.normal(*t.shape) * (0.3 if t.dim() > 1 else 0.2) + (t.dim() == 1) for n, t in state.items()}


def whole_model(sizes: dict, state: dict, dtype: torch.dtype) -> Transformer:
    model = Transformer(Config(**sizes)).to(dtype)
    model.load_state_dict(state)
    return model


def whole_block(kind: str, sizes: dict, state: dict, x: torch.Tensor, dy: torch.Tensor, dtype: str) -> dict:
    """The block, or its mlp or attention, in one process."""
    model = whole_model(sizes, state, getattr(torch, dtype))
    block = model.blocks[0]
    part: nn.Module = {"mlp": block.mlp, "attention": block.attention}.get(kind, block)  # type: ignore[assignment]
    x = x.to(model.cos.dtype).requires_grad_()
    around = () if kind == "mlp" else (model.cos[: sizes["context"]], model.sin[: sizes["context"]])
    y = part(x, *around)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "gradients": {n: p.grad for n, p in part.named_parameters()}}


def piece(name: str, tensor: torch.Tensor, place: int, world: int) -> torch.Tensor:
    """This rank's part of the parameter of that name, or of its gradient."""
    layer = name.split(".")[-2] if "." in name else ""
    if layer not in CUT:
        return tensor
    if layer in ("embedding", "head") and (missing := -len(tensor) % world):
        tensor = torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
    return tensor.chunk(world, CUT[layer])[place]


def block_is_as_whole(run, rng, expect, kind: str, size: int, grouped: bool = False, sequence: bool = False,
                      needs: list | None = None) -> None:  # fmt: skip
    """Assert that the ranks' parts of a block give what the whole gives: y, dx and every gradient."""
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    sizes = draw_sizes(rng, size)
    state = draw_state(rng, sizes)
    shape = (rng.integers(1, 2), sizes["context"], sizes["width"])
    x, dy = rng.normal(*shape), rng.normal(*shape)
    ranks = run(probes.block, kind, sizes, state, x, dy, groups, sequence, world=world, replace=needs or [])
    want = expect(whole_block, kind, sizes, state, x, dy, "float64")
    plain = expect(whole_block, kind, sizes, state, x, dy, "float32")
    for group in members(world, groups):
        for place, rank in enumerate(group):
            what = f"{kind}, rank {rank} of {group}"
            for name in ("y", "dx"):
                mine = [t[name].chunk(size, 1)[place] if sequence else t[name] for t in (want, plain)]
                close(
                    ranks[rank][name],
                    *mine,
                    f"{what}, {name}",
                    factor=10,
                    dims="batch, token, width",
                    cause=CAUSES[name],
                    suspects=lambda name=name, place=place: (
                        () if sequence else halves(kind, name, sizes, state, x, dy, place, size)
                    ),
                )
            everyone = [ranks[r]["gradients"] for r in group]
            same_gradients(everyone[place], want["gradients"], plain["gradients"], what, place, size, everyone)


def halves(kind: str, name: str, sizes: dict, state: dict, x: torch.Tensor, dy: torch.Tensor, place: int, size: int):
    model = whole_model(sizes, state, torch.float64)
    half, around = getattr(model.blocks[0], kind, None), (model.cos, model.sin)
    return of_half(kind, name, half, tuple(t[: sizes["context"]] for t in around), x, dy, place, size)


CAUSES = {
    "y": "is each summand there once?",
    "dx": "the ranks' gradients of an input that they share must be summed, once",
}


def of_norms(mine: torch.Tensor, everyones: list[torch.Tensor], place: int, world: int):
    """What the gradient of a norm may be instead of the sum over the ranks. everyones: what all of them have."""
    cause = "every rank's norms see their own tokens alone: sum"
    yield f"it is the mean over the ranks: {cause}", mine / world
    yield f"it is the sum, {world} times: {cause} once", mine * world
    if everyones:
        own = mine - sum(g for r, g in enumerate(everyones) if r != place)
        yield f"it is this rank's own, not summed with the others': {cause}", own


def same_gradients(got: dict, want: dict, plain: dict, what: str, place: int, world: int, everyone=()) -> None:
    """Assert that each parameter is there, and has its part of the whole gradient. everyone: what all ranks have."""
    assert sorted(got) == sorted(want), f"{what}: parameters {sorted(got)}, expected {sorted(want)}"
    for name in want:
        mine, yardstick = piece(name, want[name], place, world), piece(name, plain[name], place, world)
        cause = "every rank's norms see their own tokens alone: sum" if "norm" in name else "the part of this rank"
        if mine.numel():
            assert got[name] is not None, f"{what}: {name} has no gradient"
            close(
                got[name], mine, yardstick, f"{what}, gradient of {name}", factor=20, dims="row, column", cause=cause,
                suspects=lambda name=name, mine=mine: (
                    of_norms(mine, [g[name] for g in everyone], place, world) if "norm" in name else ()
                ),
            )  # fmt: skip


def messages(rows: list, phase: str) -> list:
    """[op, elements] of what was sent in a phase."""
    return [[row["op"], row["elements"]] for row in rows if row["phase"] == phase]


def bytes_sent(rows: list, phase: str) -> float:
    return sum(sent_bytes(r["op"], r["bytes"], len(r["group"])) for r in rows if r["phase"] == phase)


def keeps_its_share(run, kind: str, sizes: dict, shapes: dict, needs: list | None = None) -> None:
    """Assert that what is alive after building is this rank's part. shapes: [rank] -> {name: shape}"""
    world = len(shapes)
    for rank, got in enumerate(run(probes.kept, kind, sizes, world=world, replace=needs or [])):
        assert got["parameters"] == shapes[rank], (
            f"{kind}, rank {rank} of {world}: parameters {got['parameters']}, expected {shapes[rank]}"
        )
        own = 4 * sum(torch.Size(shape).numel() for shape in shapes[rank].values())
        measured(f"{kind}: bytes alive on a rank of {world}", got["live_bytes"], 1.25 * own, "bytes", at_most=True)
        assert got["live_bytes"] <= 1.25 * own, (
            f"{kind}, rank {rank} of {world}: {got['live_bytes']} bytes are alive after the whole layer is gone, "
            f"its own part has {own}: {what_is_alive(got['live_bytes'], own, world)}"
        )


def what_is_alive(live: int, own: int, world: int) -> str:
    """Whether that is the whole, or the whole beside the part: to an eighth of a part, as a bias may be on all."""
    for whole, told in (
        (world, "as much as the whole: a view of it keeps all of it, and .contiguous() may be one: clone the part"),
        (world + 1, "as much as the whole and the part: what it was made from is still referenced"),
    ):
        if abs(live - whole * own) <= own / 8:
            return told
    return "what else is referenced, or is it a view of more than the part?"
