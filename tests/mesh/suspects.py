"""What training on a mesh comes to where one thing of it is wrong, so that a message can name the thing.

All in float64 and in one process, asked for only where a comparison has failed. A share is what one rank of data ×
expert has of the batch; a place is one along tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.judge import harmless, in_time
from lab.model.transformer import RMSNorm

from .compose import Mixture, bare, descend
from .probes_placed import coordinate


@harmless
def named(got: Tensor, want: Tensor, suspects: Iterable[tuple[str, Tensor]]) -> str:
    """ ": " and the first cause that leaves a hundredth of what is off; "" where there is none."""
    got, off = got.double(), (got.double() - want.double()).norm()
    # One number may be near another by chance: of it no more than rounding may be left.
    most = off / 100 if got.numel() > 1 else torch.minimum(off / 10, 3e-6 * want.double().norm())
    for cause, suspect in in_time(suspects):
        if suspect.shape == got.shape and (got - suspect.double()).norm() <= most:
            return f": {cause}"
    return ""


class Read(Mixture):
    """A mixture of which some tokens' share of the gradient is left out, and whose statistics may be of groups."""

    counted: Tensor  # (tokens) whether the balancing loss has a gradient through that token
    seen: Tensor  # (tokens) whether the weights have one
    group: Tensor  # (tokens) whose statistics that token is part of

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)

        def by(weight: Tensor, t: Tensor) -> Tensor:
            return torch.where(self.seen[:, None], t @ weight.T, t @ weight.detach().T)

        logits = by(self.router.weight, rows)
        p, n = logits.softmax(-1), len(self.experts)
        counted = torch.where(self.counted[:, None], p, p.detach())
        chosen = torch.zeros_like(p).scatter(1, logits.topk(self.k).indices, 1.0)
        balances = []
        for group in self.group.unique():
            of = self.group == group
            balances.append(n * (chosen[of].sum(0) / chosen[of].sum() * counted[of].mean(0)).sum())
        self.balance = torch.stack(balances).mean()
        if self.factor is not None:
            chosen = self._kept(logits.topk(self.k).indices, x.shape[:2], chosen)
        outputs = torch.stack(
            [
                by(e.down_proj.weight, F.silu(by(e.gate_proj.weight, rows)) * by(e.up_proj.weight, rows))
                for e in self.experts
            ],
            dim=1,
        )
        return (outputs * (p * chosen)[..., None]).sum(1).view(x.shape)


class Suspects:
    """Of one run: what it was given, and what one process makes of it where something is wrong."""

    named = staticmethod(named)

    def __init__(self, model: dict, state: dict, batches: list, degrees: dict, plan: dict, lr: float):
        self.model, self.state, self.batches, self.lr = model, state, batches, lr
        self.degrees, self.plan = degrees, plan
        self.data, self.expert = degrees.get("data", 1), degrees.get("expert", 1)
        self.tensor, self.micro_batches = degrees.get("tensor", 1), plan.get("micro_batches", 1)
        self.shares = self.data * self.expert
        self.places = self.tensor if plan.get("sequence") else 1
        self._known: dict = {}

    def chunk_of(self, name: str) -> int:
        """The chunk, on its rank, that has a parameter."""
        stages, parts = self.degrees.get("pipe", 1), name.split(".")
        count, layers = stages * self.plan.get("chunks", 1), self.model["sizes"]["layers"]
        if parts[0] != "blocks":
            return 0 if parts[0] == "embedding" else (count - 1) // stages
        return next(s for s in range(count) if int(parts[1]) < -(-layers * (s + 1) // count)) // stages

    # ---- what may be wrong ----

    def loss(self, rank: int, step: int) -> Iterator[tuple[str, Tensor]]:
        """What this rank may tell as the loss of that step, where the gradients of the first step are right."""
        of, own = self.train(step + 1)["each"][step], self._shares_of(rank)  # (shares, micro-batches)
        mean = of.mean()
        yield "it is 0: the last stage has the loss, and all ranks tell it", torch.zeros_like(mean)
        if self.shares > 1:
            yield "it is that of this rank's share of the batch: the mean is over data × expert", of[own["own"]].mean()
            for axis, others in (("data", "expert"), ("expert", "data")):
                yield f"it is the mean over {axis} alone, not over {others}, too", of[own[axis]].mean()
            yield "it is the sum over data × expert, not the mean", mean * self.shares
        if self.micro_batches > 1:
            yield "it is that of the last micro-batch: the mean is over all of them", of[:, -1].mean()
            yield "it is the sum over micro-batches, not the mean", mean * self.micro_batches
        wrong = [*self._of_layers()]
        if step:
            wrong += [
                ("the gradients of the step before are still there: set them to 0, or to None", {"keep": True}),
                ("parameters have not moved: does the optimizer step?", {"lr": 0.0}),
            ]
            if self.model.get("tied"):
                cause = "embedding and head are tied, and drift apart: both stages need the sum of both gradients"
                yield cause, self.train(step + 1, untied=True)["losses"][step]
        for cause, options in wrong:
            yield cause, self.train(step + 1, **options)["losses"][step]

    def gradient(self, rank: int, name: str) -> Iterator[tuple[str, Tensor]]:
        """What the whole gradient of a parameter may be on this rank, of which it has a part."""
        yield from self._of_a_sum(rank, name)
        if self.model.get("tied") and name == "embedding.weight":
            apart = self.train(1, untied=True)["gradients"]
            cause = "it is the {}'s part alone: what is tied needs the sum of both, on both stages"
            yield cause.format("embedding"), apart[name]
            yield cause.format("head"), apart["head.weight"]
        for cause, options in (*self._of_a_part(rank), *self._of_balance(rank), *self._of_layers()):
            yield cause, self.train(1, **options)["gradients"][name]

    def _of_a_sum(self, rank: int, name: str) -> Iterator[tuple[str, Tensor]]:
        """Over whom it is summed, and by how many it is divided."""
        own, true = self._shares_of(rank), self.train(1)["gradients"]
        if ".experts." in name and self.expert > 1:
            cause = "experts that have nothing in common are summed: an expert's ranks are those along data alone"
            parts = name.split(".")
            at, each = parts.index("experts") + 1, self.model["experts"] // self.expert
            mixed = [
                ".".join([*parts[:at], str(e), *parts[at + 1 :]])
                for e in range(int(parts[at]) % each, self.model["experts"], each)
            ]
            for axes in ("whole", "expert"):
                g = self._of_shares(own[axes])
                yield cause, torch.stack([g[n] for n in mixed]).sum(0)
        right = "data" if ".experts." in name else "data × expert"
        for axes, over in (
            ("own", "it is of this rank's share alone"),
            ("data", "it is summed over data alone"),
            ("expert", "it is summed over expert alone"),
        ):
            if own[axes] == own["whole"] or (".experts." in name and axes != "expert"):
                continue
            over = "it is of what this data rank's tokens make alone" if ".experts." in name else over
            if axes == "own" and own["data"] == own["own"] and ".experts." not in name:
                over = "it is of this rank's share alone, as a sum over data alone is with data=1"
            part = self._of_shares(own[axes])[name]
            yield f"{over}: the gradients of all shares are summed, over {right}", part
            times = self.shares / len(own[axes])
            yield f"{over}: expected the sum over {right}, divided by data · expert = {self.shares}", part * times
        for number, cause in self._factors(name):
            yield cause, true[name] * number

    def _factors(self, name: str) -> list[tuple[float, str]]:
        whole = "every tensor rank has the same: nothing to sum over tensor"
        reasons = [
            (self.shares, f"divided by data · expert = {self.shares}?"),
            (self.expert, f"divided by expert = {self.expert}, too?"),
            (self.data, f"divided by data = {self.data}, too?"),
            (self.micro_batches, f"divided by the {self.micro_batches} micro-batches?"),
            (self.tensor, "summed over tensor? " + ("each of it has a part, once" if self.places > 1 else whole)),
        ]
        found: dict = {}
        for number, reason in reasons:
            if number > 1:
                found.setdefault(float(number), []).append(f"is it {reason}")
                found.setdefault(1 / number, []).append(f"is it {reason.rstrip('?')} twice?")
        return [(n, f"it is {n:.4g} times what is expected: {' Or '.join(told)}") for n, told in found.items()]

    def _of_a_part(self, rank: int) -> list[tuple[str, dict]]:
        """Tokens that are left out."""
        place, last = coordinate(self.degrees, rank)["tensor"], self.micro_batches - 1
        wrong = []
        if self.places > 1:
            cause = "it is of this tensor rank's tokens alone: under sequence parallelism what sees them is summed"
            wrong.append((f"{cause} over tensor", {"seen": [place]}))
        if last:
            wrong += [
                ("it is of the last micro-batch alone: they accumulate", {"micro": [last]}),
                ("it is of the first micro-batch alone: they accumulate", {"micro": [0]}),
                ("the last micro-batch is missing", {"micro": list(range(last))}),
                ("of this rank's share, micro-batch i is the i-th part, not every so-many-th row", {"strided": True}),
            ]
        return wrong

    def _of_balance(self, rank: int) -> Iterator[tuple[str, dict]]:
        if not self.model.get("experts"):
            return
        own = "its statistics are {}: of all tokens of a micro-batch, sum them over data × expert{}"
        beside = " × tensor" if self.places > 1 else ""
        yield "is the balancing loss there?", {"balance": 0.0}
        counts: dict = {}
        for number, axes in (
            (self.tensor, "tensor"), (self.shares, "data × expert"), (self.micro_batches, "micro-batches"),
        ):  # fmt: skip
            for times in (number, 1 / number) if number > 1 else ():
                counts.setdefault(float(times), []).append(axes)
        for times, axes in counts.items():
            cause = f"the balancing loss's gradient counts {times:.4g} times: as by the size of {' or '.join(axes)}"
            yield cause, {"balance": times}
        for by, whose, groups in (
            ("share, place", "this rank's own", self.shares * self.places),
            ("share", "of this rank's share alone", self.shares),
            ("place", "of this tensor rank's tokens alone", self.places),
            ("data", "not summed over data", self.data),
            ("expert", "not summed over expert", self.expert),
        ):
            if groups == 1:
                continue
            for times in {1.0, float(groups), float(self.shares), float(self.tensor), 1 / self.tensor}:
                cause = f"of the balancing loss: {own.format(whose, beside)}"
                yield cause, {"statistics": by, "balance": times}

    def _of_layers(self) -> Iterator[tuple[str, dict]]:
        """A model whose layers, or experts, are not where they should be."""
        chunks, stages = self.plan.get("chunks", 1), self.degrees.get("pipe", 1)
        count, layers = chunks * stages, self.model["sizes"]["layers"]
        if chunks > 1 and stages > 1:
            bounds = [-(-layers * s // count) for s in range(count + 1)]
            order = [
                layer for c in range(chunks) for r in range(stages)
                for layer in range(bounds[r * chunks + c], bounds[r * chunks + c + 1])
            ]  # fmt: skip
            cause = "chunk c of rank r is virtual stage c · p + r: a rank's chunks are not next to each other"
            yield cause, {"layers": order}
        if self.model.get("experts") and self.expert > 1:
            each, n = self.model["experts"] // self.expert, self.model["experts"]
            order = [r + i * self.expert for r in range(self.expert) for i in range(each)]
            if order != list(range(n)):
                yield "ranks along expert have experts in blocks, as tokens are sent, not in turn", {"experts": order}
        if self.model.get("factor"):
            yield "is anything dropped? The capacity is forgotten", {"dropless": True}

    # ---- one process ----

    def _shares_of(self, rank: int) -> dict:
        at = coordinate(self.degrees, rank)
        own = at["data"] * self.expert + at["expert"]
        return {
            "own": [own],
            "data": [d * self.expert + at["expert"] for d in range(self.data)],
            "expert": [at["data"] * self.expert + e for e in range(self.expert)],
            "whole": list(range(self.shares)),
        }

    def _of_shares(self, shares: list) -> dict:
        return self.train(1, shares=shares)["gradients"]

    def train(self, steps: int, **options) -> dict:
        key = (steps, str(sorted(options.items())))
        if key not in self._known:
            self._known[key] = self._train(steps, **options)
        return self._known[key]

    def _train(self, steps: int, *, shares: list | None = None, seen: list | None = None, micro: list | None = None,
               balance: float = 1.0, statistics: str = "", layers: list | None = None, experts: list | None = None,
               untied: bool = False, keep: bool = False, strided: bool = False, dropless: bool = False,
               lr: float | None = None) -> dict:  # fmt: skip
        """Losses by share and micro-batch, and the gradients of the first step. shares, seen, micro: what counts."""
        made = self._made(untied, layers, experts, dropless)
        reads = [m for m in made.modules() if isinstance(m, Read)]
        tied, count = self.model.get("tied") and not untied, self.micro_batches
        each, first = [], {}
        for step, batch in enumerate(self.batches[:steps]):
            if not keep:
                made.zero_grad()
            told = torch.zeros(self.shares, count, dtype=torch.float64)
            for i, (tokens, targets) in enumerate(zip(*(self._cut(t, strided) for t in batch), strict=True)):
                share = torch.arange(len(tokens)) // (len(tokens) // self.shares)
                place = torch.arange(tokens.shape[1]) // (tokens.shape[1] // self.places)
                whole = torch.ones_like(tokens, dtype=torch.bool)
                counted = whole & _among(share, shares)[:, None]
                known = whole & _among(place, seen)
                for m in made.modules():
                    if isinstance(m, RMSNorm):
                        m.seen = known
                for m in reads:
                    m.counted, m.seen = counted.flatten(), known.flatten()
                    m.group = self._groups(statistics, share[:, None], place).expand(tokens.shape).flatten()
                loss = F.cross_entropy(made(tokens).flatten(0, 1), targets.flatten(), reduction="none")
                told[:, i] = loss.detach().view(self.shares, -1).mean(1)
                total = (loss * counted.flatten()).sum() / loss.numel()
                total = total + balance * self.plan.get("balance", 0.01) * sum(m.balance for m in reads)
                if micro is None or i in micro:
                    (total / count).backward()
            if step == 0:
                first = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                         for n, p in made.named_parameters()}  # fmt: skip
            each.append(told)
            for p in made.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            descend(made, self.lr if lr is None else lr)
        if tied:
            first["head.weight"] = first["embedding.weight"]
        return {"each": each, "losses": [told.mean() for told in each], "gradients": first}

    def _made(self, untied: bool, layers: list | None, experts: list | None, dropless: bool):
        made = bare({**self.model, "parts": (1, 1)})
        for block in made.blocks:
            if isinstance(block.mlp, Mixture):
                factor = None if dropless else self.model.get("factor")
                parts = (self.shares, self.places)
                block.mlp = Read(made.config, self.model["experts"], self.model["k"], factor, parts)
        made.double().load_state_dict(self.state)
        if self.model.get("tied") and not untied:
            made.head.weight = made.embedding.weight
        for block in made.blocks if experts else ():
            block.mlp.experts = torch.nn.ModuleList([block.mlp.experts[e] for e in experts or ()])
        if layers:
            made.blocks = torch.nn.ModuleList([made.blocks[layer] for layer in layers])
        for norm in (m for m in made.modules() if isinstance(m, RMSNorm)):
            norm.register_forward_hook(
                lambda m, args, y: torch.where(m.seen[..., None], y, y * (m.weight.detach() / m.weight))
            )
        return made

    def _groups(self, by: str, share: Tensor, place: Tensor) -> Tensor:
        groups = {
            "": share * 0 + place * 0,
            "share, place": share * self.places + place,
            "share": share + place * 0,
            "place": share * 0 + place,
            "data": share // self.expert + place * 0,
            "expert": share % self.expert + place * 0,
        }
        return groups[by]

    def _cut(self, batch: Tensor, strided: bool) -> list[Tensor]:
        """The i-th is what all ranks' i-th micro-batches are together."""
        count = self.micro_batches
        each = [[s[i::count] for i in range(count)] if strided else s.chunk(count) for s in batch.chunk(self.shares)]
        return [torch.cat([parts[i] for parts in each]) for i in range(count)]


def _among(numbers: Tensor, some: list | None) -> Tensor:
    return torch.ones_like(numbers, dtype=torch.bool) if some is None else torch.isin(numbers, torch.tensor(some))
