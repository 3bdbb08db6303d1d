"""Timed comparisons on noisy machines: their error rate, and that inconclusive ones cost and earn no points.

Noise is simulated and seeded, and worse than measured on two busy cores.
"""

import math
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy
import pytest

from lab.course.assignment import ROOT, default
from lab.harness.compare import compare, interleaved, interval, slowest
from lab.harness.judge import never_holds, timed
from lab.harness.trace import NOISE_BYTES, Trace
from lab.measure import clock
from lab.ranks.rank_status import Gate

from .chosen import session

# ---- noise: logarithms of the measurements' slow-downs, (pairs, 2), first and second of each pair ----


def noise(n: int, rng: numpy.random.Generator) -> numpy.ndarray:
    """Another process takes half the cores, half of the time, for ten pairs on average. Times then vary.

    Also, one measurement in ten is interrupted, and takes 1.5 to 4 times as long. All measurements jitter by 5 %.
    """
    switches = rng.random(2 * n) < 1 / 20
    busy = (numpy.cumsum(switches) + rng.integers(2)) % 2 == 1
    slow = (busy * (math.log(2) + 0.3 * rng.standard_normal(2 * n))).reshape(n, 2)
    interrupted = rng.random((n, 2)) < 0.1
    return slow + interrupted * numpy.log(rng.uniform(1.5, 4, (n, 2))) + 0.05 * rng.standard_normal((n, 2))


def verdicts(ratio: float, bar: float = 1.3) -> Counter:
    """Count verdicts of 30 comparisons where a takes bar · ratio times as long as b. Pairs come in groups of six."""
    counts: Counter = Counter()
    for seed in range(30):
        rng = numpy.random.default_rng(seed)
        delays = noise(192, rng)
        swap = rng.random(192) < 0.5  # whether b is measured first
        delays[swap] = delays[swap, ::-1]
        times = numpy.exp(delays) * [bar * ratio * 0.02, 0.02]
        sixes = iter(numpy.split(times, 32))
        counts[compare(lambda sixes=sixes: tuple(next(sixes).T), bar).verdict] += 1
    return counts


def test_noisy_comparison_is_never_wrong_and_decides_far_from_bar():
    assert not verdicts(1.1)["slower"]
    assert not verdicts(1 / 1.1)["faster"]
    assert verdicts(1.25) == {"faster": 30}
    assert verdicts(1 / 1.25) == {"slower": 30}


# ---- the interval ----


@pytest.mark.parametrize(("n", "miss"), [(12, 0.01), (24, 0.05)])
def test_interval_covers_median_at_the_stated_rate(n, miss):
    rng = numpy.random.default_rng(n)
    missed = 0
    for _ in range(400):
        low, high = interval(rng.exponential(size=n), miss)
        missed += not low <= math.log(2) <= high
    assert missed <= 400 * miss


# ---- compare ----


def test_comparison_stops_at_verdict_or_limit(monkeypatch):
    calls = []
    assert compare(lambda: calls.append(1) or (3.0, 2.0), 1.4).verdict == "faster"
    assert len(calls) == 12
    assert compare(lambda: (1.0, 1.0), 1.1).verdict == "slower"
    assert compare(lambda: (1.0, 1.0), 1.0).verdict == "faster", "the bar is met"
    rng = numpy.random.default_rng(1)
    found = compare(lambda: (rng.uniform(1, 3, 5), [2.0] * 5), 1.0, pairs=(10, 40))
    assert (found.verdict, found.pairs) == ("inconclusive", 40)
    assert found.low < 1 < found.high
    now = iter(range(100))
    monkeypatch.setattr(clock, "monotonic", lambda: float(next(now)))
    found = compare(lambda: (2.0, 1.0), 1.5, limit_s=5.5)
    assert (found.verdict, found.pairs) == ("inconclusive", 5)
    assert "too few for an interval" in str(found)
    nothing = compare(lambda: (2.0, 1.0), 1.5, limit_s=0)
    assert (nothing.verdict, str(nothing)) == ("inconclusive", "no pair was measured; asked for 1.50 times")


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((1.0, 0.0), "pair 0: expected two times above 0 s, got 1 s and 0 s"),
        (([1.0, math.nan], [1.0, 1.0]), "pair 1: expected two times above 0 s, got nan s"),
        (([1.0, 2.0], [1.0]), "as many times of a as of b"),
        (([], []), "at least one"),
    ],
)
def test_compare_refuses_invalid_times(times, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        compare(lambda: times, 1.0)


def test_order_within_a_pair_is_random_and_follows_seed():
    def order(seed: int) -> list[str]:
        calls: list[str] = []
        times = interleaved(lambda: calls.append("a"), lambda: calls.append("b"), 20, seed, lambda: calls.append("|"))
        assert [len(t) for t in times] == [20, 20, 20]
        assert min(map(min, times[:2])) > 0
        assert all(starved >= 0 for starved in times[2])
        return calls

    calls = order(5)
    assert calls == order(5)
    assert calls[:2] == ["a", "b"], "one of each is not measured"
    assert calls[2::2] == ["|"] * 40
    pairs = Counter("".join(calls[3::2])[i : i + 2] for i in range(0, 40, 2))
    assert set(pairs) == {"ab", "ba"}


def test_a_world_is_as_slow_as_its_slowest_rank():
    ranks = [([1.0, 5.0], [2.0, 2.0], [0.5, 0.0]), ([3.0, 4.0], [1.0, 9.0], [0.25, 1.0])]
    assert slowest(ranks) == ([3.0, 5.0], [2.0, 9.0], [0.75, 1.0])


def test_comparison_allows_for_time_without_a_core():
    """With its cores, the first would be 2.4 times as fast (180 / 75). The second takes turns and is slower even so."""
    overlapped = compare(lambda: (180.0, 190.0, 115.0), 1.15)
    assert (overlapped.verdict, overlapped.starved) == ("inconclusive", True)
    assert overlapped.low < overlapped.bar < overlapped.high, "an interval below the bar is a fail, or is not shown"
    assert str(overlapped).endswith("asked for 1.15 times; the machine was busy with something else")
    assert compare(lambda: (180.0, 290.0, 115.0), 1.15).verdict == "slower"
    assert compare(lambda: ([180.0] * 4, [290.0] * 4, [300.0] * 4), 1.15).verdict == "inconclusive", (
        "no time is below 0"
    )
    assert compare(lambda: (180.0, 100.0, 90.0), 1.15).verdict == "faster", "points are for what was measured"
    ranks = [Trace(([0.5], [b_s], [0.25], 0.0), -1, 0.0) for b_s in (0.4, 0.3)]
    (a_s, b_s, starved_s) = timed(ranks, least_s=0.1)
    assert (a_s, b_s, starved_s) == ([0.5], [0.4], pytest.approx([0.301])), "it takes what it sleeps, whoever starves"


def test_timing_uses_the_switch_clock_when_gates_exist():
    times = {"b begins 0": 1.0, "b ends 0": 1.5, "a begins 0": 3.0, "a ends 0": 5.0}
    gates = [Gate(name, 0, seconds) for name, seconds in times.items()]
    assert timed([Trace(([9.0], [0.1], [0.0], 0.0), -1, 0.0, gates=gates)], least_s=0.1)[:2] == ([2.0], [0.5])
    with pytest.raises(AssertionError, match="lies in another"):
        timed([Trace(([9.0], [0.1], [0.0], 0.0), -1, 0.0, gates=gates[1:3])], least_s=0.1)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
def test_starved_time_of_waiting_threads_is_counted():
    """Two threads that compute on one core wait for each other."""
    code = (
        "import os, threading, time\n"
        "from lab.measure import clock\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "def work():\n"
        "    end = time.thread_time() + 0.2\n"
        "    while time.thread_time() < end: hashlib.sha256(block).digest()\n"  # releases Python's lock
        "import hashlib; block = bytes(1 << 20)\n"
        "t = threading.Thread(target=work); t.start(); work(); print(clock.starved_s())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) > 0.1


# ---- comparisons in a test ----


TIMED = """
import pytest
from lab.harness.judge import decide
from lab.harness.compare import compare
from lab.harness.pytest_plugin import exercise

@exercise("ddp.naive", kind="numerics")
def test_right(): pass

@exercise("ddp.naive", kind="timing")
def test_clearly_faster(): decide(compare(lambda: (1.2, 1.0), 1.1), "a beside b")

@exercise("ddp.naive", kind="timing")
@pytest.mark.parametrize("world", [2, 4])
def test_inconclusive(rng, world):
    decide(compare(lambda: (rng.uniform(1, 2) if world == 4 else 9.0, 1.45), 1.0), "a beside b")

@exercise("ddp.flat", kind="timing")
def test_flat_is_inconclusive(rng): decide(compare(lambda: (rng.uniform(1, 2), 1.45), 1.0), "c beside d")

@exercise("ddp.bucketed", kind="numerics")
def test_right_too(): pass

@exercise("ddp.bucketed", kind="property")
def test_sends_too_much(): assert False

@exercise("ddp.bucketed", kind="timing")
def test_does_not_count(): pass
"""


def test_inconclusive_costs_no_points_and_futile_timing_is_skipped(tmp_path, monkeypatch, warm):
    """Checks the output of a student's pytest, and the rows of its table."""
    (tmp_path / "tests" / "ddp").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "ddp" / "test_timed.py").write_text(TIMED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # also restores sys.path, which the session extends
    cache = ("--expect-cache", str(tmp_path / "expect"))  # keeps these verdicts out of the reference's cache
    _, out = session(warm, "tests", "--impl", str(ROOT / "reference"), *cache)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    half = 10 * 10 / 70 / 2  # one of two timing tests
    assert rows["ddp.naive"] == ["✓", f"{10 - half:.2f}/{10 - half:.2f}", f"{half:.2f}?"]
    flat, bucketed = (default().exercise(f"ddp.{n}").points for n in ("flat", "bucketed"))
    assert rows["ddp.flat"] == ["?", "0/0", f"{flat:g}?"]
    assert f"? inconclusive: {round(half, 2) + flat:g} points, neither earned nor lost" in out
    assert "test_inconclusive[4]: a beside b: 1." in out
    assert rows["ddp.bucketed"] == ["✗", f"{0.6 * bucketed:g}/{bucketed:g}"]
    assert "2 failed, 4 passed, 2 skipped" in out, "one of the two was not run"


def test_never_holds_judges_peak_and_names_largest_tensor():
    small, forbidden = Trace(None, NOISE_BYTES, 0.0), 4 * NOISE_BYTES
    meter = {"largest_op": "aten.bmm.default", "largest_shape": [9, 9], "largest_line": "tiles.py:4"}

    def check(peak: int, seen=lambda: meter) -> None:
        never_holds(Trace(None, NOISE_BYTES + peak, 0.0), small, "a matrix", forbidden, 1 << 20, seen)

    check(2 * NOISE_BYTES + (1 << 20))  # half of the forbidden bytes, plus the needed bytes
    with pytest.raises(AssertionError, match=r"a matrix takes 34 MB.*\(9, 9\), made by aten.bmm.default in tiles.py:4"):
        check(3 * NOISE_BYTES)
    with pytest.raises(AssertionError, match=r"needs 1.0 MB$"):  # without an explanation, since the meter failed
        check(3 * NOISE_BYTES, dict)
    with pytest.raises(ValueError, match="four times the noise"):
        never_holds(small, small, "a matrix", forbidden - 1, 0, lambda: meter)
    with pytest.raises(pytest.skip.Exception):
        never_holds(Trace(None, -1, 0.0), small, "a matrix", forbidden, 0, lambda: meter)
