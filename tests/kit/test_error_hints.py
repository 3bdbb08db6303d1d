"""Remedies: each is for something that torch still says in these words."""

from __future__ import annotations

import pytest
import torch

from lab.harness import error_hints

from . import probes


def not_part_of_group(runner):
    runner.run(probes.make_groups, "wrong source", world=4)


def splits_of_another_group(runner):
    runner.run(probes.make_groups, "other splits", world=2)


def nothing_recorded(runner):
    torch.ones(2).sum().backward()


def leaf_changed(runner):
    torch.ones(2, requires_grad=True).add_(1)


def twice(runner):
    y = torch.ones(2, requires_grad=True).square().sum()
    y.backward()
    y.backward()


def overwritten(runner):
    y = torch.ones(2, requires_grad=True).exp()
    y.mul_(2)
    y.sum().backward()


def not_contiguous(runner):
    runner.run(probes.make_groups, "not contiguous", world=2)


def viewed(runner):
    torch.ones(2, 3).T.view(6)


def too_few(runner):
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            return g

    Two.apply(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward()


PROVOKED = (
    not_part_of_group, splits_of_another_group, nothing_recorded, leaf_changed, twice, overwritten, not_contiguous,
    viewed, too_few,
)  # fmt: skip


@pytest.mark.parametrize(("part", "provoke"), list(zip(error_hints.REMEDIES, PROVOKED, strict=True)))
def test_torch_says_it_in_these_words(runner, part, provoke):
    with pytest.raises(Exception, match=part) as error:
        provoke(runner)
    assert error_hints.of(str(error.value)) == error_hints.REMEDIES[part]
    assert "object at 0x" not in str(error.value)


def test_what_has_no_remedy_has_none():
    assert error_hints.of("division by zero") == ""
    assert error_hints.added("division by zero\nhere") == "division by zero\nhere"
    assert error_hints.added("must not: view size is not compatible\nhere").endswith(".view never does\nhere")
