"""Modules with random member names, registered in random order, so that neither reveals the order in which they run."""

import string
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from .rng import Rng


class Named(nn.Module):
    """A module with these members, given in the order in which they run. Its own code uses their plain names.

    self.up may be registered as "k_up". The order of registration differs from the order of the arguments, and the
    alphabetical order differs from both. Equal seeds give equal names and orders, so use a seed that all ranks know,
    such as sizes.
    """

    def __init__(self, seed: object, **members: nn.Module | nn.Parameter):
        super().__init__()
        rng = Rng(repr(seed), "names")
        registered = _reordered(rng, [*members])
        letters = sorted(rng.shuffled(string.ascii_lowercase)[: len(members)])
        drawn = zip(_reordered(rng, registered), letters, strict=True)
        self.drawn = {plain: f"{letter}_{plain}" for plain, letter in drawn}
        for plain in registered:
            setattr(self, self.drawn[plain], members[plain])

    def __getattr__(self, name: str) -> Any:
        drawn = self.__dict__.get("drawn", {})
        return getattr(self, drawn[name]) if name in drawn else super().__getattr__(name)


class Numbered(Named):
    """A list of modules that are registered in another order, "k_2" before "c_0"; self[2] is the third one."""

    def __init__(self, seed: object, modules: Sequence[nn.Module]):
        super().__init__(seed, **{str(i): m for i, m in enumerate(modules)})

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, i: int) -> nn.Module:
        return getattr(self, str(range(len(self))[i]))

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))


def plain_name(name: str) -> str:
    """Remove the random letters from a name: "layers.k_2.c_up" gives "layers.2.up"."""
    return ".".join(part[2:] if part[1:2] == "_" else part for part in name.split("."))


def number_of(name: str) -> int:
    """The number of the module that has this parameter: 2 for "layers.k_2.c_up"."""
    return int(plain_name(name).split(".")[1])


def _reordered(rng: Rng, names: list[str]) -> list[str]:
    """The same names in another order, if there is one."""
    orders = iter(lambda: rng.shuffled(names), None)
    return next(order for order in orders if order != names or len(names) < 2)
