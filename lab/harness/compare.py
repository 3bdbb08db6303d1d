"""Timed comparisons: measures pairs in turn, and decides by an interval around the median of their ratios.

A comparison that is undecided at the limit is *inconclusive*: the test does not pass, but costs no points.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
import torch

from ..measure import clock
from ..ranks import gates

Times = float | Sequence[float]
Pairs = tuple[Times, Times] | tuple[Times, Times, Times]  # times of a, of b, and how long b waited for a core
CONFIDENCE = 0.99  # probability that no look of a comparison decides wrongly
RESAMPLES = 4000  # five looks at 99 % cut off 0.1 % on each side, that is 4 of the resamples


@dataclass(frozen=True)
class Comparison:
    """Result of comparing pairs of times with a bar. ratio = a / b: b is that many times as fast as a."""

    verdict: str  # "faster": at least the bar; "slower": less than the bar; "inconclusive": not known
    ratio: float  # the median over pairs
    low: float  # confidence interval of that median at the last look; (0, inf) if there are too few pairs
    high: float  # below the bar only if the verdict is "slower"; if starved, computed without b's waits for a core
    bar: float
    pairs: int
    starved: bool = False  # b was slower, but perhaps only because it waited for a core

    def __str__(self) -> str:
        if not self.pairs:
            return f"no pair was measured; asked for {self.bar:.2f} times"
        known = f"{self.low:.2f} to {self.high:.2f}" if self.low else "too few for an interval"
        busy = "; the machine was busy with something else" if self.starved else ""
        return f"{self.ratio:.2f} times ({known}, {self.pairs} pairs), asked for {self.bar:.2f} times{busy}"


def compare(
    measure: Callable[[], Pairs], bar: float, *, pairs: tuple[int, int] = (12, 192), limit_s: float = 60.0
) -> Comparison:
    """Measure pairs until the interval of the median of a / b lies on one side of `bar`, or a limit is reached.

    measure: each call returns times of a and equally many of b, measured in turn; see `interleaved`. It may add a third
    entry: how long b waited for a core. Then b counts as "slower" only if it is also slower without these waits.
    pairs: (number for the first look, largest number). limit_s: time after which `measure` is not called again.
    It looks at pairs[0] pairs, at twice as many, and so on to pairs[1]. Each look is another chance of error, so each
    has an equal share of 1 − CONFIDENCE (Bonferroni). Raises ValueError for a time that is not finite and above 0.
    """
    looks, start = _looks(*pairs), clock.monotonic()
    share = (1 - CONFIDENCE) / len(looks)
    logarithms = unstarved = numpy.empty(0)
    for look in looks:
        while len(logarithms) < look and clock.monotonic() - start < limit_s:
            a_s, b_s, *starved_s = measure()
            logarithms = numpy.concatenate([logarithms, _log_ratios(a_s, b_s, len(logarithms))])
            unstarved = numpy.concatenate([unstarved, _log_ratios(a_s, _without_waits(b_s, *starved_s))])
        found = _look(logarithms, bar, share)
        if found.verdict == "slower" and (adjusted := _look(unstarved, bar, share)).verdict != "slower":
            found = replace(found, verdict="inconclusive", high=adjusted.high, starved=True)
        if found.verdict != "inconclusive" or len(logarithms) < look:
            break
    return found


def interleaved(
    a: Callable[[], object] | None,
    b: Callable[[], object] | None,
    pairs: int,
    seed: int = 0,
    ready: Callable[[], object] = lambda: None,
    check: Callable[[int], object] = lambda which: None,
) -> tuple[list[float], list[float], list[float]]:
    """Measure a and b in pairs, one after the other, in a random order for each pair. Called in a probe.

    Returns the seconds of a, the seconds of b, and the seconds in which this process's threads waited for a core
    during b. Both run once before, unmeasured. If one of them is None, another process measures it.

    seed: gives the order, so all ranks of a world measure in the same order. ready: called before each measurement, to
    make new inputs or for a barrier. check: called after each, with 0 for a and 1 for b, to check its result. A GPU is
    synchronized. Each measurement begins and ends with a mark in the switch, whose clock `judge.timed` uses.
    """
    rng = random.Random(seed)
    seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
    calls = {which: call for which, call in enumerate((a, b)) if call is not None}
    for call in calls.values():
        call()
    for pair in range(pairs):
        for which in [which for which in rng.sample((0, 1), 2) if which in calls]:
            ready()
            _wait_for_the_device()
            gates.mark(f"{'ab'[which]} begins {pair}")
            starved_s, begin = clock.starved_s(), clock.perf_counter()
            calls[which]()
            _wait_for_the_device()
            seconds[which].append(clock.perf_counter() - begin)
            gates.mark(f"{'ab'[which]} ends {pair}")
            if which == 1:
                seconds[2].append(max(0.0, clock.starved_s() - starved_s))
            check(which)
    return seconds


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], list[float], list[float]]:
    """Combine three lists per rank into three: the slowest rank's times of a and of b, and the sum of waits for cores.

    A step ends when its last rank ends. Ranks wait for each other, so any rank's wait may have delayed the last.
    """
    a_s, b_s, starved_s = (list(zip(*lists, strict=True)) for lists in zip(*ranks, strict=True))
    return [max(times) for times in a_s], [max(times) for times in b_s], [sum(times) for times in starved_s]


def interval(values: numpy.ndarray, miss: float) -> tuple[float, float]:
    """A confidence interval of the median: it misses the median with a probability of at most `miss`.

    Computes two intervals, and returns the smallest that contains both. The first lies between order statistics. It is
    exact for independent values of any distribution, since each lies below the median with probability ½ (Conover 1999,
    section 3.2); it is infinite for too few values. The second is a bootstrap over circular blocks of √n values
    (Politis and Romano 1992). It is wider if the machine was busy for several pairs in a row.
    """
    n, ordered = len(values), numpy.sort(values)
    outside = _order_statistic(n, miss / 2)
    if not outside:
        return -math.inf, math.inf
    rng, block = numpy.random.default_rng(0), round(math.sqrt(n))
    starts = rng.integers(0, n, (RESAMPLES, math.ceil(n / block), 1))
    resampled = values[(starts + numpy.arange(block)) % n].reshape(RESAMPLES, -1)[:, :n]
    low, high = numpy.quantile(numpy.median(resampled, axis=1), [miss / 2, 1 - miss / 2], method="inverted_cdf")
    return min(float(low), float(ordered[outside - 1])), max(float(high), float(ordered[n - outside]))


def _order_statistic(n: int, tail: float) -> int:
    """The largest k such that the k-th smallest of n values exceeds the median with probability at most `tail`."""
    below = 0
    for k in range(n // 2 + 1):
        below += math.comb(n, k)
        if below > tail * 2**n:
            return k
    return n // 2


def _look(logarithms: numpy.ndarray, bar: float, miss: float) -> Comparison:
    low, high = interval(logarithms, miss)
    verdict = "faster" if low >= math.log(bar) else "slower" if high < math.log(bar) else "inconclusive"
    ratio = math.exp(numpy.median(logarithms)) if len(logarithms) else math.nan
    return Comparison(verdict, ratio, math.exp(low), math.exp(high), bar, len(logarithms))


def _looks(least: int, most: int) -> list[int]:
    """Numbers of pairs at which to look: least, 2 · least, 4 · least, …, most."""
    if not 1 <= least <= most:
        raise ValueError(f"pairs: expected (least, most) with 1 <= least <= most, got {(least, most)}")
    doubled = (least << times for times in itertools.count())
    return [*itertools.takewhile(lambda look: look < most, doubled), most]


def _without_waits(b_s: Times, starved_s: Times = 0.0) -> numpy.ndarray:
    """b's times without its waits for a core; at least 1 % of each, so that they stay above 0."""
    b = numpy.asarray(b_s, dtype=numpy.float64)
    return numpy.maximum(b - numpy.asarray(starved_s), b / 100)


def _log_ratios(a_s: Times | numpy.ndarray, b_s: Times | numpy.ndarray, offset: int = 0) -> numpy.ndarray:
    """Logarithms of a / b: twice as fast and half as fast are then equally far from 0."""
    a, b = (numpy.atleast_1d(numpy.asarray(times, dtype=numpy.float64)) for times in (a_s, b_s))
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"expected as many times of a as of b, at least one, got shapes {a.shape} and {b.shape}")
    wrong = ~(numpy.isfinite(a) & numpy.isfinite(b) & (a > 0) & (b > 0))
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"pair {offset + i}: expected two times above 0 s, got {a[i]:g} s and {b[i]:g} s")
    return numpy.log(a) - numpy.log(b)


def _wait_for_the_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
