"""The gradient noise scale: the batch size beyond which larger batches pay less, estimated from two batch sizes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lab.provided import provided


@provided
@dataclass(frozen=True)
class Noise:
    """Estimates of |G|², of tr(Σ), and of their ratio tr(Σ) / |G|², a number of samples."""

    gradient_squared: float
    trace: float
    noise_scale: float


def two_batch_estimates(
    small_squared: float, big_squared: float, small_batch: int, big_batch: int
) -> tuple[float, float]:
    """Unbiased estimates of |G|² and tr(Σ), from squared lengths of gradients of two batch sizes.

    The gradient of B samples has E|G_B|² = |G|² + tr(Σ) / B, with G the true gradient and Σ the covariance of one
    sample's. Two sizes give two equations:

        |G|² ≈ (B_big |G_big|² − B_small |G_small|²) / (B_big − B_small)
        tr(Σ) ≈ (|G_small|² − |G_big|²) / (1 / B_small − 1 / B_big)

    Either can be negative: an estimate cut off at 0 is no longer unbiased. With 1 and 4 samples, 10 and 4: 2 and 8.
    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1.
    """
    gradient_squared = (big_batch * big_squared - small_batch * small_squared) / (big_batch - small_batch)
    trace = (small_squared - big_squared) / (1 / small_batch - 1 / big_batch)
    return gradient_squared, trace


class NoiseScale:
    """Measures the gradient noise scale while a model trains on the ranks of `group`. A step is

        loss(ddp(x), y).backward()
        noise.before(model.parameters())
        ddp.finish_gradient_synchronization()
        noise.after(model.parameters())

    with a wrapper that sends only in finish_gradient_synchronization(). The small batch is the batch of one rank, the
    big batch that of all W ranks. Each step issues one all-reduce of one number; all ranks get the same estimates.
    Source: McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.
    """

    def __init__(self, samples: int, *, decay: float = 1.0, group: dist.ProcessGroup | None = None):
        """samples: number of samples averaged into one rank's gradient. decay: weight of a step relative to the next.

        Raises ValueError unless samples ≥ 1, 0 < decay ≤ 1 and the group has more than one rank: one batch size is not
        enough.
        """
        self.world = dist.get_world_size(group)
        if samples < 1 or not 0 < decay <= 1 or self.world < 2:
            raise ValueError(
                f"expected samples >= 1, 0 < decay <= 1 and a group of two ranks at least, "
                f"got {samples}, {decay} and {self.world}"
            )
        self.samples, self.decay, self.group = samples, decay, group
        self.small_squared = torch.zeros(())
        self.gradient_squared = self.trace = self.weight = 0.0  # sums over steps

    def before(self, parameters: Iterable[Tensor]) -> None:
        """Measure this rank's own gradients, before they are averaged over ranks. No gradient is kept."""
        self.small_squared = _squared(parameters)

    def after(self, parameters: Iterable[Tensor]) -> None:
        """Measure the averaged gradients, which are equal on all ranks, and add the step to the running averages.

        |G_small|² is the mean over ranks. Parameters whose .grad is None do not count; dtypes may differ.
        """
        small_squared = self.small_squared / self.world
        dist.all_reduce(small_squared, group=self.group)
        gradient_squared, trace = two_batch_estimates(
            small_squared.item(), _squared(parameters).item(), self.samples, self.world * self.samples
        )
        self.gradient_squared = self.decay * self.gradient_squared + gradient_squared
        self.trace = self.decay * self.trace + trace
        self.weight = self.decay * self.weight + 1

    def estimate(self) -> Noise:
        """The means over all steps, k steps ago weighing decayᵏ, and the ratio *of the means*.

        The ratio of one step's estimates is biased, and may have no mean at all: its denominator comes close to 0. The
        ratio is infinite where the mean of |G|² is not above 0: the noise hides the gradient. Raises RuntimeError
        before the first step.
        """
        if not self.weight:
            raise RuntimeError("expected at least one step: before(), then after()")
        gradient_squared, trace = self.gradient_squared / self.weight, self.trace / self.weight
        return Noise(gradient_squared, trace, trace / gradient_squared if gradient_squared > 0 else math.inf)


def _squared(parameters: Iterable[Tensor]) -> Tensor:
    """The squared length of all gradients as one vector, () in float64."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.stack([torch.zeros((), dtype=torch.float64), *norms]).square().sum()
