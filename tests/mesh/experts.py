"""Draws tokens and experts; its oracles follow each token in a loop, in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

KINDS = ["even", "uneven", "one rank", "nothing", "dropped"]


def draw_kinds(rng, world: int) -> list:
    """Draw cases [rank][kind], with one or two choices per token."""
    drawn = []
    for k, kind in zip(rng.shuffled([1, 2, 1, 2, 2]), KINDS, strict=True):
        n = world * rng.integers(1, 2) if world > 1 else rng.integers(2, 4)
        drawn.append(draw_tokens(rng, world, n, k, kind))
    return [[cases[r] for cases in drawn] for r in range(world)]


def draw_tokens(rng, world: int, n: int, k: int, kind: str, dtype=torch.float32) -> list:
    """Draw one case per rank: x, experts and n.

    kind: with "one rank", all tokens go to one rank; with "nothing", the first rank has no tokens; with "dropped", some
    choices are −1.
    """
    cases, width = [], rng.integers(2, 4)
    for r in range(world):
        tokens = 0 if kind == "nothing" and r == 0 else 2 * world if kind == "even" else rng.integers(1, 6)
        experts = torch.tensor([rng.shuffled(range(n))[:k] for _ in range(tokens)], dtype=torch.int64).view(tokens, k)
        if kind == "one rank":
            experts = torch.tensor([[n - 1 - c for c in range(k)]] * tokens)
        if kind == "dropped":
            gone = torch.tensor([[rng.choice([True, False]) for _ in range(k)] for _ in range(tokens)])
            experts = experts.masked_fill(gone, -1)
        cases.append({"x": rng.normal(tokens, width).to(dtype), "experts": experts, "n": n, "gates": None})
    return cases


def spread(drawn: list, members: list, world: int) -> list:
    """Give the drawn cases to the members of a group, and no cases to other ranks."""
    return [drawn[members.index(r)] if r in members else [] for r in range(world)]


def kept(case: dict) -> int:
    """Number of choices in a case that are not dropped."""
    return int((case["experts"] >= 0).sum())


def arrivals(cases: list, place: int) -> list:
    """(expert, source, token) of each row for the experts at this place, in the order that dispatch documents."""
    k, each = cases[0]["experts"].shape[1], cases[0]["n"] // len(cases)
    return [
        (e, source, t)
        for e in range(place * each, (place + 1) * each)
        for source, case in enumerate(cases)
        for t in range(len(case["x"]))
        for c in range(k)
        if int(case["experts"][t, c]) == e
    ]


def capped(experts: torch.Tensor, n: int, factor: float) -> tuple[torch.Tensor, list, int]:
    """Take one choice after the other, first choices before second ones; return (kept, dropped by expert, limit)."""
    tokens, k = experts.shape
    limit, taken, dropped = math.ceil(factor * tokens * k / n), [0] * n, [0] * n
    left = experts.clone()
    for c in range(k):
        for t in range(tokens):
            e = int(experts[t, c])
            if taken[e] == limit:
                left[t, c] = -1
                dropped[e] += 1
            else:
                taken[e] += 1
    return left, dropped, limit


def draw_layer(rng, n: int) -> tuple[dict, dict]:
    """Draw the sizes of a layer, and a state with all its experts."""
    width, hidden = rng.integers(2, 3) * 2, rng.integers(2, 5)
    shapes = {"router.weight": (n, width)}
    for e in range(n):
        shapes |= {f"experts.{e}.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        shapes[f"experts.{e}.down_proj.weight"] = (width, hidden)
    sizes = {"width": width, "hidden": hidden, "experts": n, "k": 2, "factor": None, "balance": 0.5, "reduce": True}
    return sizes, {name: rng.normal(*shape) for name, shape in shapes.items()}


def one_process(sizes: dict, state: dict, shares: list, dtype: str) -> dict:
    """Run the layer with all experts on all ranks' tokens, and backward of the global mean loss."""
    kind = {"float64": torch.float64, "float32": torch.float32}[dtype]
    p = {name: t.to(kind).requires_grad_() for name, t in state.items()}
    n, k = sizes["experts"], sizes["k"]
    xs = [s["x"].to(kind).requires_grad_() for s in shares]
    choices, tokens, losses, answers, total = [0] * n, sum(map(len, xs)), [], [], 0
    for share, x in zip(shares, xs, strict=True):
        logits = x @ p["router.weight"].T
        probabilities = torch.softmax(logits, dim=-1)
        ranked = [sorted(range(n), key=lambda e: (-row[e], e))[:k] for row in logits.tolist()]
        experts = torch.tensor(ranked, dtype=torch.int64).view(-1, k)
        for e in experts.flatten().tolist():
            choices[e] += 1
        left, dropped = experts, [0] * n
        if sizes["factor"] is not None:
            left, dropped, _ = capped(experts, n, sizes["factor"])
        rows = []
        for t in range(len(x)):
            row = x[t] * 0
            for c in range(k):
                e = int(left[t, c])
                if e >= 0:
                    gate, up, down = (p[f"experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
                    row = row + probabilities[t, e] * (down @ (F.silu(gate @ x[t]) * (up @ x[t])))
            rows.append(row)
        y = torch.stack(rows)
        total = total + probabilities.sum(0)
        losses.append((y * share["weights"].to(kind) + y**2).sum(-1).mean())
        answers.append({"y": y.detach(), "dropped": dropped, "lost": (left < 0).all(1).tolist()})
    f = torch.tensor(choices, dtype=kind) / (tokens * k)
    balance = n * (f * total / tokens).sum()
    (sum(losses) / len(losses) + sizes["balance"] * balance).backward()
    gradients = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in p.items()}  # 0: nobody chose it
    return {"ranks": answers, "balance": balance.detach(), "gradients": gradients}
