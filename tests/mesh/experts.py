"""Draws tokens and experts, follows each token, and runs a layer of experts in one process."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from lab.harness import layouts
from lab.model.transformer import Config, SwiGLU

from . import probes_experts as probes
from .carried import traced

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
            dropped = torch.tensor([[rng.choice([True, False]) for _ in range(k)] for _ in range(tokens)])
            experts = experts.masked_fill(dropped, -1)
        x = rng.normal(tokens, width).to(dtype)
        layout = layouts.draw(rng, x=x, experts=experts, dy=x, y=x, gates=experts, weights=x)[1]
        cases.append({"x": x, "experts": experts, "n": n, "gates": None, "layouts": layout})
    return cases


def in_group(run, probe: Callable, cases: list, members: Sequence = (), no_group: bool = False, **options) -> list:
    """Run the probe with cases[group rank][case]; return values with messages, [case][group rank].

    members: the group's ranks in a larger world. no_group: the function gets no group.
    """
    ranks, groups = [*members] or [*range(len(cases))], None if no_group else [[*members]] if members else []
    by_rank = [cases[ranks.index(r)] if r in ranks else [] for r in range(max(ranks) + 1)]
    world = options.pop("world", None if no_group else len(by_rank))
    values = traced(run, probe, by_rank, groups, world=world, **options)
    return [[values[r][i] for r in ranks] for i in range(len(cases[0]))]


def each_case(kinds: Iterable, cases: list, results: list) -> Iterator[tuple]:
    """Yield (kind, cases of all ranks, rank, case of this rank, result) per kind and rank.

    cases[rank][kind], results[kind][rank]."""
    for kind, rank_cases, answers in zip(kinds, zip(*cases, strict=True), results, strict=True):
        yield from ((kind, rank_cases, i, *pair) for i, pair in enumerate(zip(rank_cases, answers, strict=True)))


def kept_choices(case: dict) -> int:
    """Return the number of choices in a case that are not dropped."""
    return int((case["experts"] >= 0).sum())


def arrivals(cases: list, rank: int) -> list:
    """Return (expert, source, token) of each row for the experts of this rank, in the documented order of dispatch."""
    k, per_rank = cases[0]["experts"].shape[1], cases[0]["n"] // len(cases)
    return [
        (e, source, t)
        for e in range(rank * per_rank, (rank + 1) * per_rank)
        for source, case in enumerate(cases)
        for t in range(len(case["x"]))
        for c in range(k)
        if int(case["experts"][t, c]) == e
    ]


def capped(experts: torch.Tensor, n: int, factor: float) -> tuple[torch.Tensor, list, int]:
    """Apply the capacity limit to choices, all first choices first; return (kept, dropped by expert, limit)."""
    tokens, k = experts.shape
    limit, counts, dropped = math.ceil(factor * tokens * k / n), [0] * n, [0] * n
    kept = experts.clone()
    for c in range(k):
        for t in range(tokens):
            e = int(experts[t, c])
            if counts[e] == limit:
                kept[t, c] = -1
                dropped[e] += 1
            else:
                counts[e] += 1
    return kept, dropped, limit


def draw_layer(rng, n: int) -> tuple[dict, dict]:
    """Draw the sizes of a layer, and a state with all its experts."""
    sizes = {"width": rng.integers(2, 3) * 2, "hidden": rng.integers(2, 5), "experts": n, "k": 2, "factor": None,
             "balance": 0.5, "reduce": True}  # fmt: skip
    return sizes, {name: rng.normal(*t.shape) for name, t in mixture_of(sizes).state_dict().items()}


class Mixture(nn.Module):
    """Runs every expert on every token, and multiplies by 0 where a choice was not made, or was dropped.

    factor: the capacity factor of each rank's tokens. parts: number of ranks along the batch, and along the context.
    """

    def __init__(self, config: Config, n: int, k: int, factor: float | None = None, parts: tuple = (1, 1)):
        super().__init__()
        self.k, self.factor, self.parts, self.dropped, self.gap = k, factor, parts, 0, math.inf
        self.router = nn.Linear(config.width, n, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Also set balance and lost (rows, n); update dropped, and gap, the smallest logit gap that decides choices."""
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        p, ranked = logits.softmax(-1), logits.sort(descending=True)
        chosen = torch.zeros_like(p).scatter(1, ranked.indices[:, : self.k], 1.0)
        share = chosen.sum(0) / chosen.sum()
        self.balance = len(self.experts) * (share * p.mean(0)).sum()
        gaps = (ranked.values[:, :-1] - ranked.values[:, 1:]).detach()
        margins = gaps[:, self.k - 1 : self.k] if self.factor is None else gaps[:, : self.k]  # the order counts too
        self.gap = min([self.gap, *margins.flatten().tolist()])
        mask = chosen if self.factor is None else self._kept_mask(ranked.indices[:, : self.k], x.shape[:2])
        self.lost = chosen - mask
        self.dropped += int(self.lost.sum())
        outputs = torch.stack([expert(rows) for expert in self.experts], dim=1)  # (tokens, n, width)
        return (outputs * (p * mask)[..., None]).sum(1).view(x.shape)

    def _kept_mask(self, choices: torch.Tensor, shape: tuple) -> torch.Tensor:
        """Return a mask (rows, n): 1 where a choice is within the capacity of its rank, else 0."""
        shares, splits = self.parts
        ranks = torch.arange(len(choices)).view(shares, shape[0] // shares, splits, shape[1] // splits).transpose(1, 2)
        n = len(self.experts)
        mask = torch.zeros(len(choices), n + 1, dtype=self.router.weight.dtype)  # last column: dropped choices, −1
        for rows in ranks.flatten(2).flatten(0, 1):
            mask[rows] = mask[rows].scatter(1, capped(choices[rows], n, self.factor or 1.0)[0] % (n + 1), 1.0)
        return mask[:, :n]


def mixture_of(sizes: dict, shares: int = 1) -> Mixture:
    config = Config(width=sizes["width"], heads=1, kv_heads=1, hidden=sizes["hidden"])
    return Mixture(config, sizes["experts"], sizes["k"], sizes["factor"], (shares, 1))


def one_process(sizes: dict, state: dict, shares: list, dtype: str) -> dict:
    """Run the layer with all experts on all ranks' tokens, equally many per rank; backward of the global mean loss."""
    torch_dtype = getattr(torch, dtype)
    layer = mixture_of(sizes, len(shares)).to(torch_dtype)
    layer.load_state_dict(state)
    x, weights = (torch.stack([share[name] for share in shares]).to(torch_dtype) for name in ("x", "weights"))
    y = layer(x)  # (ranks, tokens, width)
    (probes.objective(y, weights) + sizes["balance"] * layer.balance).backward()
    answers = [
        {"y": rank_y.detach(), "dropped": lost.sum(0).int().tolist(), "lost": lost.sum(1) == sizes["k"]}
        for rank_y, lost in zip(y, layer.lost.view(*x.shape[:2], -1), strict=True)
    ]
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"ranks": answers, "balance": layer.balance.detach(), "gradients": gradients}
