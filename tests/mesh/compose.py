"""Draws models and batches for whole meshes, and trains the same model in one process on the same micro-batches."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.model.transformer import Transformer

from . import probes_compose as probes
from .carried import traced
from .experts import Mixture
from .probes_placed import AXES, coordinate, part_of, stage_of


def train(model: nn.Module, steps: list, lr: float = 0.0, extra: Callable[[], Any] = int) -> dict:
    """Train by gradient descent in one process, one step per list of micro-batches (inputs, targets).

    extra: returns an additional loss per micro-batch, called after forward. Returns each step's mean loss, without
    extra, and its gradients.
    """
    losses, gradients = [], []
    for micro_batches in steps:
        model.zero_grad()
        found = []
        for inputs, targets in micro_batches:
            found.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
            ((found[-1] + extra()) / len(micro_batches)).backward()
        losses.append(torch.stack(found).mean().detach())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with torch.no_grad():  # by hand: the first step of a torch optimizer imports a compiler, which takes 2 s
            for p in model.parameters():
                p -= lr * p.grad
    return {"losses": losses, "gradients": gradients}


def one_process(model: dict, state: dict, batches: list, shares: int, micro_batches: int, balance: float,
                hook: Callable[[Transformer], object] | None = None) -> dict:  # fmt: skip
    """Train one step per batch; return losses, the first step's gradients, the smallest logit gap between a chosen
    expert and the next, and the number of dropped choices. hook: called with the model, to register hooks."""
    transformer = bare(model, state, "float64")
    if hook:
        hook(transformer)
    mixtures = [m for m in transformer.modules() if isinstance(m, Mixture)]
    # Join the i-th micro-batches of all ranks into one.
    steps = []
    for batch in batches:
        joined = (t.unflatten(0, (shares, micro_batches, -1)).transpose(0, 1).flatten(1, 2) for t in batch)
        steps.append(list(zip(*joined, strict=True)))
    got = train(transformer, steps, probes.LR, lambda: balance * sum(m.balance for m in mixtures))
    return {
        "losses": [float(loss) for loss in got["losses"]], "gradients": got["gradients"][0],
        "gap": min([math.inf, *(m.gap for m in mixtures)]), "dropped": sum(m.dropped for m in mixtures),
    }  # fmt: skip


def with_dropout(model: dict, state: dict, batches: list, degrees: dict, plan: dict, masks: list) -> dict:
    """As `one_process`, for a dense model with given dropout. masks: per rank, the masks that it drew, in order."""
    drawn, coords = [iter(m) for m in masks], [coordinate(degrees, rank) for rank in range(len(masks))]

    def add_hooks(transformer: Transformer) -> None:
        for site, module in enumerate([transformer.embedding, *transformer.blocks]):
            stage = 0 if site == 0 else stage_of(site - 1, len(transformer.blocks), degrees["pipe"])
            ranks = [rank for rank, coord in enumerate(coords) if coord["pipe"] == stage]
            module.register_forward_hook(functools.partial(apply_masks, ranks))

    def apply_masks(ranks: list, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        mask = torch.stack([next(drawn[rank]) for rank in ranks]).unflatten(0, (degrees["data"], -1))
        # mask: (data, tensor, batch, context, width). Tensor ranks share a mask, or mask their own tokens.
        parts = mask.transpose(1, 2).flatten(2, 3) if plan["sequence"] else mask[:, 0]
        return output * parts.flatten(0, 1).double() / (1 - plan["dropout"])

    return one_process(model, state, batches, degrees["data"], plan["micro_batches"], 0.0, add_hooks)


def bare(model: dict, state: dict | None = None, dtype: str = "float32") -> Transformer:
    """Build the whole model in one process; its experts run on all tokens."""

    def to_moe(transformer: Transformer, *options: Any) -> None:
        for block in transformer.blocks:
            block.mlp = Mixture(transformer.config, *options, model.get("parts", (1, 1)))

    return probes.build_model(model, to_moe, state).to(getattr(torch, dtype))


def draw_model(rng, tensor: int = 1, layers: int = 2, experts: int = 0, tied: bool = False) -> dict:
    """Draw different sizes, divisible by `tensor`. experts: 0 for dense SwiGLUs."""
    kv_heads = tensor * rng.integers(1, 2 if tensor < 3 else 1)
    heads = 2 * kv_heads
    sizes = {
        "layers": layers, "width": 2 * heads, "heads": heads, "kv_heads": kv_heads,
        "hidden": tensor * rng.integers(2, 4), "vocabulary": tensor * 5 + rng.integers(0, tensor - 1),
        "context": tensor * 2,
    }  # fmt: skip
    return {"sizes": sizes, "experts": experts, "k": 2 if experts > 2 else 1, "tied": tied}


def model_for(rng, degrees: dict, plan: dict | None = None) -> dict:
    """Draw a model that the mesh divides; with an expert axis, a mixture of experts."""
    virtual = degrees.get("pipe", 1) * (plan or {}).get("chunks", 1)
    experts = degrees["expert"] * rng.integers(1, 2) if degrees.get("expert", 1) > 1 else 0
    return draw_model(rng, degrees.get("tensor", 1), virtual + rng.integers(0, 1), experts)


def draw_like(rng, state: dict, size: float) -> dict:
    """Draw weights large enough that every part changes the result; norm weights differ from 1."""
    return {n: rng.normal(*t.shape) * (size if t.dim() > 1 else 0.2) + (t.dim() == 1) for n, t in state.items()}


def draw_run(rng, expect, model: dict, degrees: dict, plan: dict, steps: int, rows: int = 1) -> tuple:
    """Draw (state, batches, result of one process), such that rounding does not change routing, losses or gradients.

    Some gradients are only rounding noise, such as q_proj's if a row repeats one token, and cannot be compared.
    """
    shares, micro_batches = degrees.get("data", 1) * degrees.get("expert", 1), plan.get("micro_batches", 1)
    shape = (shares * micro_batches * rows, model["sizes"]["context"])
    oracle_model = {**model, "parts": [shares, degrees.get("tensor", 1) if plan.get("sequence") else 1]}
    for _ in range(20):
        state = draw_like(rng, bare(model).state_dict(), 0.4)
        if model["tied"]:
            state["head.weight"] = state["embedding.weight"]
        batches = [
            [rng.tokens(*shape, vocabulary=model["sizes"]["vocabulary"]) for _ in range(2)] for _ in range(steps)
        ]
        perturbed = {name: t * (1 + 1e-6 * rng.normal(*t.shape)) for name, t in state.items()}  # 10 × rounding error
        args = (batches, shares, micro_batches, plan.get("balance", 0.01))
        want, noisy = (expect(one_process, oracle_model, weights, *args) for weights in (state, perturbed))
        losses = zip(noisy["losses"], want["losses"], strict=True)
        gradients = ((noisy["gradients"][name], wanted) for name, wanted in want["gradients"].items())
        if (
            want["gap"] > 1e-4
            and all(abs(value - wanted) < 1e-5 * wanted for value, wanted in losses)
            and all((value - wanted).norm() <= 1e-4 * wanted.norm() for value, wanted in gradients)
        ):
            return state, batches, want
    raise AssertionError("no run in 20 draws without near ties in its routing, and whose rounding errors stay small")


def members(degrees: dict, rank: int, axes: tuple) -> tuple:
    """Return the ranks that differ from this one only along these axes."""
    fixed = [axis for axis in AXES if axis not in axes]
    coords = [coordinate(degrees, r) for r in range(math.prod(degrees.values()))]
    return tuple(r for r, coord in enumerate(coords) if all(coord[a] == coords[rank][a] for a in fixed))


def check(run, rng, expect, degrees: dict, plan: dict, model: dict, steps: int = 5, rows: int = 1) -> list:
    """Judge losses and gradients against one process's; return each rank's values, and its messages by step."""
    world = math.prod(degrees.values())
    state, batches, want = draw_run(rng, expect, model, degrees, plan, steps, rows)
    assert "factor" not in model or want["dropped"], "the test drew a limit that nothing meets"
    ranks = traced(
        run, probes.trained, model, state, degrees, plan, batches, world=world,
        parts=[f"step {i}" for i in range(steps)],
    )  # fmt: skip
    what = " × ".join(f"{axis}={n}" for axis, n in degrees.items()) or "one rank"
    what += "".join(f", {option}" for option in ("sequence", "fsdp") if plan.get(option))
    check_same_training(ranks, want, degrees, what)
    return ranks


def check_same_training(ranks: list, want: dict, degrees: dict, what: str) -> None:
    """Assert that losses agree to 1e-5 of their value, and gradients to 1e-4 of each parameter's norm, on every rank.

    The first loss comes first, then its gradients, since an error there also changes all later losses.
    """

    def judge_losses(steps: Iterable[int], note: str = "") -> None:
        for (rank, got), step in itertools.product(enumerate(ranks), steps):
            loss, expected = got["losses"][step], want["losses"][step]
            assert abs(loss - expected) <= 1e-5 * abs(expected), (
                f"{what}, rank {rank}, step {step}: loss {loss:.7f}, expected {expected:.7f}, that of one process{note}"
            )

    judge_losses([0])
    for rank, got in enumerate(ranks):
        compare(got["gradients"], want["gradients"], degrees, rank, f"{what}: gradient")
    check_covered(ranks, want["gradients"], degrees, what)
    judge_losses(range(1, len(want["losses"])), "; the gradients of the first step are right")


def compare(found: list, want: dict, degrees: dict, rank: int, what: str) -> None:
    """Assert that a rank's pieces (see `probes_compose.pieces`) equal those parts of the whole tensors."""
    coord, wrong, right = coordinate(degrees, rank), [], []
    for name, shape, start, piece in found:
        part = part_of(name, want[name], coord["tensor"], degrees.get("tensor", 1))
        assert shape == list(part.shape), (
            f"{what} of {name}, rank {rank}: shape {shape}, expected {list(part.shape)}: the whole is "
            f"{list(want[name].shape)}, cut along tensor"
        )
        assert piece is not None, f"{what} of {name}, rank {rank}: there is none"
        true = part.flatten()[start : start + len(piece)]
        error, norm = float((piece.double() - true).norm()), float(want[name].norm())
        (right if error <= 1e-4 * norm else wrong).append(
            (name, f"off by {error:.2g}, the whole has norm {norm:.2g}; its own has {piece.norm():.2g}, expected "
             f"{true.norm():.2g}")
        )  # fmt: skip
    assert not wrong, (
        f"{what} of {wrong[0][0]}, rank {rank} at {coord}: {wrong[0][1]}; off on this rank: {_kinds(wrong)}; right: "
        f"{_kinds(right)}"
    )


def _kinds(pieces: list) -> str:
    """List distinct names, without the numbers of blocks and experts."""
    names = (re.sub(r"experts\.\d+", "experts.*", name) for name, _ in pieces)
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)) or "none"


def check_covered(ranks: list, want: dict, degrees: dict, what: str) -> None:
    """Assert that every element of every parameter is on some rank."""
    world = degrees.get("tensor", 1)
    missing = {(n, t): torch.ones(part_of(n, want[n], t, world).numel()) for n in want for t in range(world)}
    for rank, got in enumerate(ranks):
        for name, _, start, piece in got["gradients"]:
            missing[name, coordinate(degrees, rank)["tensor"]][start : start + len(piece)] = 0
    uncovered = [name for (name, _), numbers in missing.items() if numbers.any()]
    assert not uncovered, f"{what}: no rank has all of {uncovered[0]}"
