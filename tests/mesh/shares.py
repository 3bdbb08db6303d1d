"""A rank's share of a whole model, and why one has more, or drops nothing."""

from __future__ import annotations

from collections import defaultdict

from .compose import AXES, kinds_of
from .probes_placed import names_at, part_of

ALL = dict.fromkeys(AXES, 2)


def too_many(told: dict, share: dict, shards: int) -> str:
    """Name the parameters of which a rank has more than its share, and the rule that it breaks."""
    has: dict = defaultdict(int)
    for name, count in told["numbers"]:
        has[name] += count

    def layer(name: str) -> str:
        return ".".join(name.split(".")[:2])

    here = {layer(name) for name, count in share.items() if count}
    for cause, wrong in (
        ("of another stage: the first ones take the layers that are left over", lambda n: layer(n) not in here),
        ("an expert of another rank along expert: each has a block", lambda n: not share[n]),
        ("tensor has not cut it", lambda n: shards == 1 and has[n] >= 2 * share[n]),
        ("it is not sharded over data", lambda n: shards > 1 and has[n] >= share[n] > 1),
    ):
        if found := [n for n in has if has[n] > 0 and wrong(n)]:
            return f": it has {has[found[0]]} numbers of {found[0]}: {cause} (so with {len(found)} parameters)"
    for cause, found in (
        ("are still alive, though no parameter of this rank's: something refers to them", told["beside"]),
        ("are alive as wholes, of which its parameters are views: clone the part", told["views"]),
    ):
        if found:
            return f": of the model that was given {kinds_of(found)} ({len(found)} tensors) {cause}"
    return ": its parameters have its share of the numbers: are others alive beside them, or views of a whole?"


def share_of(model: dict, state: dict, here: dict) -> dict:
    """The most numbers of each parameter, of a rank of the mesh of 2 × 2 × 2 × 2."""
    layout = {"degrees": ALL, "layers": model["sizes"]["layers"], "experts": model["experts"], "tied": False}
    mine = names_at(state, here, layout)
    return {n: part_of(n, t, here["tensor"], 2).numel() if n in mine else 0 for n, t in state.items()}


def why_not(dropouts: list) -> str:
    """Why modules drop nothing. dropouts: (p, training) of each nn.Dropout."""
    if not dropouts:
        return ": there is no nn.Dropout left"
    if all(p == 0 for p, _ in dropouts):
        return ": dropout.p is 0, expected plan.dropout"
    return "" if any(training for _, training in dropouts) else ": its modules are not in training"
