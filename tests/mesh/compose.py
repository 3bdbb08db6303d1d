"""Draws models and batches for whole meshes, and trains the same model in one process on the same micro-batches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.model.transformer import Config, SwiGLU, Transformer

from .experts import capped
from .probes_placed import AXES, coordinate
from .tensor_oracles import piece


class Mixture(nn.Module):
    """Runs every expert on every token, and multiplies by 0 where a choice was not made, or was dropped.

    factor: the capacity factor of each rank's tokens. parts: number of ranks along the batch, and along the context.
    """

    def __init__(self, config: Config, n: int, k: int, factor: float | None = None, parts: tuple = (1, 1)):
        super().__init__()
        self.k, self.factor, self.parts, self.dropped = k, factor, parts, 0
        self.router = nn.Linear(config.width, n, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        p, ranked = logits.softmax(-1), logits.sort(descending=True).values
        chosen = torch.zeros_like(p).scatter(1, logits.topk(self.k).indices, 1.0)
        share = chosen.sum(0) / chosen.sum()
        self.balance = len(self.experts) * (share * p.mean(0)).sum()
        gaps = (ranked[:, :-1] - ranked[:, 1:]).detach()
        self.gap = min(gaps[:, self.k - 1 : self.k].flatten().tolist(), default=math.inf)
        if self.factor is not None:
            self.gap = float(gaps[:, : self.k].min())  # who is first, too
            chosen = self._kept(logits.topk(self.k).indices, x.shape[:2], chosen)
        outputs = torch.stack([expert(rows) for expert in self.experts], dim=1)  # (tokens, n, width)
        return (outputs * (p * chosen)[..., None]).sum(1).view(x.shape)

    def _kept(self, choices: Tensor, shape: tuple, chosen: Tensor) -> Tensor:
        """Drop the choices beyond the limit of each rank's tokens. chosen: (rows, n)."""
        shares, along = self.parts
        ranks = torch.arange(len(choices)).view(shares, shape[0] // shares, along, shape[1] // along).transpose(1, 2)
        kept = torch.zeros_like(chosen)
        for rows in ranks.flatten(2).flatten(0, 1):
            left, dropped, _ = capped(choices[rows], len(self.experts), self.factor or 1.0)
            self.dropped += sum(dropped)
            for row, own in zip(rows.tolist(), left.tolist(), strict=True):
                for expert in own:
                    kept[row, expert] += expert >= 0
        return kept


def alone(model: dict, state: dict, batches: list, shares: int, micro_batches: int, balance: float, lr: float,
          dtype: str = "float64") -> dict:  # fmt: skip
    """Train a step per batch; return losses, the first step's gradients, and the smallest gap between a chosen expert
    and the next."""
    made = bare(model).to(getattr(torch, dtype))
    made.load_state_dict(state)
    if model.get("tied"):
        made.head.weight = made.embedding.weight
    mixtures = [m for m in made.modules() if isinstance(m, Mixture)]
    losses, first, gap = [], {}, float("inf")
    for step, batch in enumerate(batches):
        made.zero_grad()
        total = 0.0
        for tokens, targets in zip(*(_micro_batches(t, shares, micro_batches) for t in batch), strict=True):
            loss = F.cross_entropy(made(tokens).flatten(0, 1), targets.flatten())
            ((loss + balance * sum(m.balance for m in mixtures)) / micro_batches).backward()
            total += float(loss.detach()) / micro_batches
            gap = min([gap, *(m.gap for m in mixtures)])
        if step == 0:
            first = {name: p.grad.clone() for name, p in made.named_parameters()}
        losses.append(total)
        descend(made, lr)
    return {"losses": losses, "gradients": first, "gap": gap, "dropped": sum(m.dropped for m in mixtures),
            "parameters": {name: p.detach() for name, p in made.named_parameters()}}  # fmt: skip


def descend(model: nn.Module, lr: float) -> None:
    """Gradient descent by hand: the first step of an optimizer of torch imports a compiler, which takes 2 s."""
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad


def dropped_out(model: dict, state: dict, batches: list, degrees: dict, plan: dict, masks: list, lr: float) -> dict:
    """As `alone`, for a dense model with given dropout. masks: per rank, the masks that it drew, in order."""
    made = bare(model).double()
    made.load_state_dict(state)
    drawn = [iter(own) for own in masks]
    layers, stages, shares = model["sizes"]["layers"], degrees["pipe"], degrees["data"]
    place: dict = {}

    def drop(site: int):
        stage = 0 if site == 0 else next(s for s in range(stages) if site - 1 < -(-layers * (s + 1) // stages))

        def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            ranks = [r for r in range(len(masks)) if coordinate(degrees, r) | {"data": place["share"], "pipe": stage}
                     == coordinate(degrees, r)]  # fmt: skip
            kept = [next(drawn[r]) for r in ranks]  # of all tensor ranks
            whole = torch.cat(kept, 1) if plan["sequence"] else kept[0]
            return output * whole.double() / (1 - plan["dropout"])

        return hook

    for site, module in enumerate([made.embedding, *made.blocks]):
        module.register_forward_hook(drop(site))
    losses, first = [], {}
    for step, (tokens, targets) in enumerate(batches):
        made.zero_grad()
        total, count = 0.0, shares * plan["micro_batches"]
        for place["share"], own in enumerate(zip(tokens.chunk(shares), targets.chunk(shares), strict=True)):
            for x, y in zip(*(t.chunk(plan["micro_batches"]) for t in own), strict=True):
                loss = F.cross_entropy(made(x).flatten(0, 1), y.flatten()) / count
                loss.backward()
                total += float(loss.detach())
        if step == 0:
            first = {name: p.grad.clone() for name, p in made.named_parameters()}
        losses.append(total)
        descend(made, lr)
    return {"losses": losses, "gradients": first}


def bare(model: dict) -> Transformer:
    made = Transformer(Config(**model["sizes"]))
    if model.get("experts"):
        for block in made.blocks:
            block.mlp = Mixture(
                made.config, model["experts"], model["k"], model.get("factor"), model.get("parts", (1, 1))
            )
    return made


def _micro_batches(batch: Tensor, shares: int, count: int) -> list[Tensor]:
    """The i-th joins the i-th micro-batches of all ranks."""
    each = [part.chunk(count) for part in batch.chunk(shares)]
    return [torch.cat([parts[i] for parts in each]) for i in range(count)]


def draw_model(rng, tensor: int = 1, layers: int = 2, experts: int = 0, tied: bool = False) -> dict:
    """Draw different sizes that `tensor` ranks divide. experts: 0 for dense SwiGLUs."""
    kv_heads = tensor * rng.integers(1, 2 if tensor < 3 else 1)
    heads = 2 * kv_heads
    sizes = {
        "layers": layers, "width": 2 * heads, "heads": heads, "kv_heads": kv_heads,
        "hidden": tensor * rng.integers(2, 4), "vocabulary": tensor * 5 + rng.integers(0, tensor - 1),
        "context": tensor * 2,
    }  # fmt: skip
    return {"sizes": sizes, "experts": experts, "k": 2 if experts > 2 else 1, "tied": tied}


def draw_run(rng, expect, model: dict, degrees: dict, plan: dict, steps: int, rows: int = 1, lr: float = 0.1) -> tuple:
    """Draw (state, batches, result of one process), such that rounding does not change routing, losses or gradients.

    Some gradients are 0 except for rounding, as q_proj's where a row repeats one token: a comparison would see noise.
    """
    shares, micro_batches = degrees.get("data", 1) * degrees.get("expert", 1), plan.get("micro_batches", 1)
    shape = (shares * micro_batches * rows, model["sizes"]["context"])
    told = {**model, "parts": [shares, degrees.get("tensor", 1) if plan.get("sequence") else 1]}
    for _ in range(20):
        state = {
            name: rng.normal(*t.shape) * (0.4 if t.dim() > 1 else 0.2) + (t.dim() == 1)
            for name, t in bare(model).state_dict().items()
        }
        if model["tied"]:
            state["head.weight"] = state["embedding.weight"]
        batches = [
            [rng.tokens(*shape, vocabulary=model["sizes"]["vocabulary"]) for _ in range(2)] for _ in range(steps)
        ]
        moved = {name: t * (1 + 1e-6 * rng.normal(*t.shape)) for name, t in state.items()}  # ten times rounding
        rest = (batches, shares, micro_batches, plan.get("balance", 0.01), lr)
        want, other = (expect(alone, told, weights, *rest) for weights in (state, moved))
        losses = zip(other["losses"], want["losses"], strict=True)
        gradients = ((other["gradients"][name], here) for name, here in want["gradients"].items())
        if (
            want["gap"] > 1e-4
            and all(abs(there - here) < 1e-5 * here for there, here in losses)
            and all((there - here).norm() <= 1e-4 * here.norm() for there, here in gradients)
        ):
            return state, batches, want
    raise AssertionError("no run in 20 draws without near ties in its routing, and whose rounding errors stay small")


def members(degrees: dict, rank: int, axes: tuple) -> tuple:
    """The ranks that differ from this one along these axes alone."""
    others = [axis for axis in AXES if axis not in axes]
    places = [coordinate(degrees, r) for r in range(math.prod(degrees.values()))]
    return tuple(r for r, place in enumerate(places) if all(place[a] == places[rank][a] for a in others))


def same_as_alone(ranks: list, want: dict, degrees: dict, what: str) -> None:
    """Assert that losses agree to 1e-5 of their value, and gradients to 1e-4 of each parameter's norm, on every rank.

    The first loss comes first, then its gradients, since an error there also changes all later losses.
    """
    for later in (False, True):
        for rank, got in enumerate(ranks):
            for step, (loss, expected) in enumerate(zip(got["losses"], want["losses"], strict=True)):
                if (step > 0) == later and not abs(loss - expected) <= 1e-5 * abs(expected):
                    raise AssertionError(
                        f"{what}, rank {rank}, step {step}: loss {loss:.7f}, expected {expected:.7f}, that of one "
                        f"process{'; the gradients of the first step are right' * later}"
                    )
        if later:
            break
        for rank, got in enumerate(ranks):
            compare(got["gradients"], want["gradients"], degrees, rank, f"{what}: gradient")
        covered(ranks, want["gradients"], degrees, what)


def part_of(name: str, whole: Tensor, place: int, world: int) -> Tensor:
    """The part of a parameter on the tensor rank at `place`. Experts are whole."""
    return whole if ".experts." in name else piece(name, whole, place, world)


def compare(found: list, want: dict, degrees: dict, rank: int, what: str) -> None:
    world, place = degrees.get("tensor", 1), coordinate(degrees, rank)["tensor"]
    wrong, right = [], []
    misshaped(found, want, place, world, rank, what)

    def own_part(name: str, whole: Tensor, start: int, count: int) -> Tensor:
        return part_of(name, whole, place, world).flatten()[start : start + count]

    for name, _, start, own in found:
        assert own is not None, f"{what} of {name}, rank {rank}: there is none"
        error = float((own.double() - own_part(name, want[name], start, len(own))).norm())
        is_right = error <= 1e-4 * float(want[name].norm())
        (right if is_right else wrong).append((name, start, own, error))
    if not wrong:
        return
    name, start, own, error = wrong[0]
    true = own_part(name, want[name], start, len(own))
    raise AssertionError(
        f"{what} of {name}, rank {rank} at {coordinate(degrees, rank)}: off by {error:.2g}, the whole has norm "
        f"{float(want[name].norm()):.2g}; its own has {float(own.norm()):.2g}, expected {float(true.norm()):.2g}"
        f"; {f'off on this rank: {_kinds(wrong)}; right: {_kinds(right)}' if right else 'all are off'}"
    )


def misshaped(found: list, want: dict, place: int, world: int, rank: int, what: str) -> None:
    """Assert that each parameter has the shape of this tensor rank's part."""
    expected = {name: list(part_of(name, want[name], place, world).shape) for name, *_ in found}
    odd = {name: shape for name, shape, *_ in found if shape != expected[name]}
    if not odd:
        return
    cut = [name for name in expected if expected[name] != list(want[name].shape)]
    whole = [name for name, shape in odd.items() if shape == list(want[name].shape) and name in cut]
    name, shape = next(iter(odd.items()))
    because = f"; so {', '.join(f'{n} {s}' for n, s in list(odd.items())[1:4])}" if len(odd) > 1 else ""
    if len(whole) == len(odd):
        nothing = len(whole) == len(cut)
        because = f": {kinds_of(whole)} {'is' if len(whole) == 1 else 'are'} whole on each tensor rank"
        because += ": nothing is cut along tensor" if nothing else ", and to be cut along tensor, as others are"
    raise AssertionError(f"{what} of {name}, rank {rank}: shape {shape}, expected {expected[name]}{because}")


def _kind(name: str) -> str:
    """A parameter's name without the numbers of its block and expert."""
    return re.sub(r"experts\.\d+", "experts.*", re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight"))


def kinds_of(names: Iterable[str]) -> str:
    """Names without the numbers of blocks and experts, each once."""
    return ", ".join(dict.fromkeys(map(_kind, names))) or "none"


def _kinds(pieces: list) -> str:
    return kinds_of(name for name, *_ in pieces)


def covered(ranks: list, want: dict, degrees: dict, what: str) -> None:
    """Assert that every number of every parameter is on some rank."""
    world = degrees.get("tensor", 1)
    for name, whole in want.items():
        for place in range(world):
            size = part_of(name, whole, place, world).numel()
            there = torch.zeros(size, dtype=torch.bool)
            for rank, got in enumerate(ranks):
                for found, _, start, own in got["gradients"]:
                    if found == name and coordinate(degrees, rank)["tensor"] == place:
                        there[start : start + len(own)] = True
            assert bool(there.all()), f"{what}: no rank has all of {name}"
