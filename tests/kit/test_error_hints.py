"""torch still raises each message for which the kit has a remedy."""

import pytest
import torch

from lab.harness import error_hints

from . import probes


def weight() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


class TwoInputs(torch.autograd.Function):
    """Its backward returns one gradient for two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, g):
        return g


def overwritten(run):
    y = weight().exp()
    y.mul_(2)
    y.sum().backward()


PROVOKED = (  # code that raises each message, in the order of REMEDIES
    lambda run: run(probes.make_groups, "wrong source", world=4),
    lambda run: run(probes.make_groups, "other splits", world=2),
    lambda run: torch.ones(2).sum().backward(),
    lambda run: weight().add_(1),
    lambda run: [loss.backward() for loss in 2 * [weight().square().sum()]],
    overwritten,
    lambda run: run(probes.make_groups, "not contiguous", world=2),
    lambda run: torch.ones(2, 3).T.view(6),
    lambda run: TwoInputs.apply(weight(), torch.ones(2)).sum().backward(),
)


@pytest.mark.parametrize(("part", "provoke"), list(zip(error_hints.REMEDIES, PROVOKED, strict=True)))
def test_provoked_error_gets_its_remedy(runner, part, provoke):
    with pytest.raises(Exception, match=part) as error:
        provoke(runner.run)
    assert error_hints.remedy_for(str(error.value)) == error_hints.REMEDIES[part]
    assert "object at 0x" not in str(error.value)


def test_unknown_error_gets_no_remedy():
    assert error_hints.remedy_for("division by zero") == ""
    assert error_hints.with_remedy("division by zero\nhere") == "division by zero\nhere"
    assert error_hints.with_remedy("must not: view size is not compatible\nhere").endswith(".view never does\nhere")
