"""Formulas for the cost of data parallelism.

Must hold: for any sizes, worlds and links, an all-reduce starts only when its gradients exist, and all-reduces follow
each other on one network. Typical fakes: the lower bound as the time of a step (too short where buckets queue in the
middle); all communication hidden, or none; one bucket too many or too few; a rule of thumb for the best bucket. The
oracle simulates each message and uses no formula.
"""

import math

import pytest

from lab.course.listing import inputs
from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import probes_cost as probes

ACCOUNTING = "ddp.accounting"
VARIANTS = ["naive", "flat", "overlapped", "bucketed"]
RELATIVE = 1e-9


def ring(size: float, world: int, case: dict) -> float:
    """Return the seconds of 2(W − 1) messages, each with a W-th of the tensor."""
    return 2 * (world - 1) * (case["alpha_s"] + size / world / case["bytes_per_s"])


def simulate(case: dict) -> dict:
    """Simulate backward, which issues all-reduces, and a network that sends one after the other; return all costs."""
    sizes, world = case["sizes"], case["world"]
    o = {"forward_s": 0.0, "optimizer_s": 0.0, "bucket_bytes": 25 * 2**20, **case["options"]}
    backward, issued, bucket, clock = o["backward_s"], [], [], 0.0  # issued: (when, bytes)
    for i, size in enumerate(reversed(sizes), 1):
        if o["variant"] == "bucketed" and bucket and sum(bucket) + size > o["bucket_bytes"]:
            issued.append((clock, sum(bucket)))
            bucket = []
        clock += backward * size / sum(sizes)
        bucket.append(size)
        if o["variant"] in ("naive", "overlapped") or i == len(sizes):
            issued.append((clock if o["variant"] in ("overlapped", "bucketed") else backward, sum(bucket)))
            bucket = []
    costs, end = [ring(size, world, case) for _, size in issued], 0.0
    for (when, _), cost in zip(issued, costs, strict=True):
        end = max(end, when) + cost
    bound = max(backward, issued[0][0] + sum(costs), issued[-1][0] + costs[-1])
    rest_s = o["forward_s"] + o["optimizer_s"]
    return {
        "all_reduces": len(costs), "communication_s": sum(costs), "exposed_s": max(0.0, end - backward),
        "step_s": rest_s + max(backward, end), "bound_s": rest_s + bound,
    }  # fmt: skip


def in_buckets(case: dict, size: int, variant: str = "bucketed") -> dict:
    """Return the case with options of a step: this variant, and buckets of `size` bytes."""
    return {**case, "options": {"variant": variant, "backward_s": case["backward_s"], "bucket_bytes": size}}


def draw(rng, variant: str = "", world: int = 0, **options) -> dict:
    """Draw a model, and a link on which transfers take between a tenth and ten times as long as backward."""
    sizes = [4 * rng.integers(1, 10 ** rng.integers(2, 6)) for _ in range(rng.integers(2, 12))]
    world = world or rng.integers(2, 40)
    backward = 10 ** rng.uniform(-3, 0)
    transfer, latency = (backward * 10 ** rng.uniform(-1, 1) for _ in range(2))
    case = {
        "sizes": sizes, "world": world, "bytes_per_s": 2 * sum(sizes) / transfer,
        "alpha_s": latency / (2 * max(1, world - 1) * len(sizes)) * rng.choice([0.0, 0.1, 1.0]),
    }  # fmt: skip
    if variant:
        case["options"] = {"variant": variant, "backward_s": backward, **options}
    else:
        case["backward_s"] = backward
    return case


def check(run, cases: list[dict], cause: str = "") -> None:
    results = run(probes.steps, cases)
    for case, got in zip(cases, results, strict=True):
        want = simulate(case)
        for name, value in want.items():
            slack = RELATIVE * (want["step_s"] if name == "exposed_s" else value)
            measured(f"{name} of a drawn step, {case['options']['variant']}", 1e3 * got[name], 1e3 * value, "ms")
            assert abs(got[name] - value) <= slack, (
                f"{name}: expected {value:.9g}, got {got[name]:.9g}{cause and f': {cause}'}{inputs(case)}"
            )


@exercise(ACCOUNTING, kind="numerics")
def test_all_reduce_time_sums_its_ring_messages(run, rng):
    cases = [
        {"bytes": rng.integers(0, 10**9), "world": w, "alpha_s": rng.uniform(0, 1e-3),
         "bytes_per_s": 10 ** rng.uniform(6, 11)}
        for w in (1, 2, 3, 4, 7, 64, rng.integers(100, 1000))
    ]  # fmt: skip
    for case, got in zip(cases, run(probes.rings, cases), strict=True):
        want = ring(case["bytes"], case["world"], case)
        assert abs(got - want) <= RELATIVE * want, (
            f"all-reduce: expected {want:.6g} s, got {got:.6g}: 2(W − 1) messages of size / W bytes, each "
            f"with a latency of its own{inputs(case)}"
        )


@exercise(ACCOUNTING, kind="numerics")
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_costs_match_a_simulated_step(run, rng, variant):
    cases = []
    for _ in range(40):
        case = draw(rng, variant, forward_s=rng.uniform(0, 1), optimizer_s=rng.uniform(0, 0.1))
        case["options"]["bucket_bytes"] = rng.integers(1, sum(case["sizes"]))
        cases.append(case)
    single = draw(rng, variant)
    single["sizes"] = single["sizes"][:1]
    check(run, [*cases, single, draw(rng, variant, world=1)])


@exercise(ACCOUNTING, kind="numerics")
def test_buckets_at_their_limits(run, rng):
    """Buckets are exactly full, one byte too small, smaller than any parameter, or larger than all; default: 25 MiB."""
    cases = []
    for _ in range(5):
        case = draw(rng, "bucketed")
        sizes = case["sizes"]
        end = rng.integers(2, len(sizes))
        for limit in (sum(sizes[-end:]), sum(sizes[-end:]) - 1, 1, max(sizes), sum(sizes), 2 * sum(sizes)):
            cases.append({**case, "options": {**case["options"], "bucket_bytes": limit}})
    default = draw(rng, "bucketed")
    default["sizes"] = [13_000_000] * 4  # two have 26 MB: more than 25 MB, less than 25 MiB
    check(run, [*cases, default], "a bucket holds at most bucket_bytes, but a larger parameter has one of its own")


@exercise(ACCOUNTING, kind="numerics")
def test_the_best_bucket_is_the_best_of_all(run, rng):
    """Sizes between two sums of neighbours give equal buckets, so the test tries each sum."""
    cases = [draw(rng) for _ in range(25)]
    for case in cases[:5]:
        case["sizes"] = [case["sizes"][0]] * len(case["sizes"])  # many sums are equal
    for case in cases[5:10]:
        case["alpha_s"] *= 1e-5  # steps differ by little
    results = run(probes.best, cases)
    for case, (got, kind) in zip(cases, results, strict=True):
        sizes = case["sizes"]
        candidates = {1, *(sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1))}
        steps = {size: simulate(in_buckets(case, size))["step_s"] for size in candidates}
        assert kind == "int", f"bucket_bytes is a {kind}, expected int"
        # Steps that differ by about 1e-9 may count as equal or not.
        smallest = [
            min(size for size, step in steps.items() if step <= min(steps.values()) * (1 + slack))
            for slack in (RELATIVE / 2, 2 * RELATIVE)
        ]
        step_s = simulate(in_buckets(case, got))["step_s"] if got >= 1 else math.inf
        assert got in smallest, (
            f"a step with buckets of {got} bytes takes {step_s:.9g} s, with {smallest[0]} {steps[smallest[0]]:.9g}: "
            f"expected the smallest of those with the shortest step, 1 or a sum of neighbours{inputs(case)}"
        )


@exercise(ACCOUNTING, kind="numerics")
def test_limits_are_where_communication_is_just_hidden(run, rng):
    cases = []
    for i in range(30):
        case = draw(rng)
        case = {**case, "bytes": sum(case["sizes"]), "samples": rng.integers(1, 64)}
        if i % 3 == 1:
            case["backward_s"] *= 100  # hidden by far
        if i % 3 == 2:
            case["world"] = 1
        if i % 5 == 1:
            case["alpha_s"] = 0.0
        cases.append(case)
    cases[0]["alpha_s"] = cases[0]["backward_s"]  # the latencies alone take longer than backward
    for case, (samples, bytes_per_s, world) in zip(cases, run(probes.limits, cases), strict=True):
        judge_samples(case, samples)
        judge_bandwidth(case, bytes_per_s)
        judge_world(case, world)


def judge_samples(case: dict, samples: int) -> None:
    needed = ring(case["bytes"], case["world"], case) / case["backward_s"] * case["samples"]
    fewest = [max(1, math.ceil(needed * (1 + slack))) for slack in (-RELATIVE, RELATIVE)]
    assert samples in fewest, (
        f"{samples} samples a rank, expected {fewest[0]}: communication takes as long as the backward of {needed:.6g}"
        f"{inputs(case)}"
    )


def judge_bandwidth(case: dict, bandwidth: float) -> None:
    world = case["world"]
    if world == 1 or 2 * (world - 1) * case["alpha_s"] >= case["backward_s"]:
        want = 0 if world == 1 else math.inf  # nothing to send, or latencies alone take longer than backward
        assert bandwidth == want, f"{world} ranks need {bandwidth} bytes/s, expected {want}{inputs(case)}"
        return
    needed = ring(case["bytes"], world, {**case, "bytes_per_s": bandwidth}) if bandwidth > 0 else math.inf
    # The time left for bytes is a difference; it loses digits if latencies take nearly all of backward.
    assert abs(needed - case["backward_s"]) <= RELATIVE * case["backward_s"], (
        f"at {bandwidth:.6g} bytes/s communication takes {needed:.6g} s, expected backward's "
        f"{case['backward_s']:.6g}: latencies take their part of it{inputs(case)}"
    )


def judge_world(case: dict, limit: int) -> None:
    def ratio(world: int) -> float:
        """Return backward time over communication time, for the same global batch on `world` ranks."""
        needed = ring(case["bytes"], world, case)
        return math.inf if needed == 0 else case["backward_s"] * case["world"] / world / needed

    assert limit >= 1, f"{limit} ranks at most, but one has nothing to wait for{inputs(case)}"
    assert ratio(limit) >= 1 - RELATIVE, (
        f"with {limit} ranks backward takes {ratio(limit):.6g} times as long as communication: not hidden{inputs(case)}"
    )
    assert ratio(limit + 1) <= 1 + RELATIVE, (
        f"{limit} ranks at most, but with {limit + 1} communication is hidden too: backward takes "
        f"{ratio(limit + 1):.6g} times as long; the global batch is samples · world, shared by all{inputs(case)}"
    )


@exercise(ACCOUNTING, kind="numerics")
def test_the_examples_by_hand(run):
    link = {"alpha_s": 1e-4, "bytes_per_s": 1e9, "world": 4}
    (ring_s,) = run(probes.rings, [{"bytes": 10**6, **link}])
    (got,) = run(probes.steps, [in_buckets({"sizes": [10**6] * 2, **link, "backward_s": 6e-3}, 1, "overlapped")])
    times_ms = [1e3 * t for t in (ring_s, got["communication_s"], got["exposed_s"], got["step_s"])]
    assert times_ms == pytest.approx([2.1, 4.2, 2.1, 8.1], rel=1e-9), (
        f"expected an all-reduce of 2.1 ms, and communication, exposed and step of 4.2, 2.1 and 8.1 ms, got {times_ms}"
    )


@exercise(ACCOUNTING, kind="property")
def test_without_latency_the_smallest_bucket_is_best_and_with_much_of_it_one(run, rng):
    no_latency, high_latency = [draw(rng) for _ in range(5)], [draw(rng) for _ in range(5)]
    for case in no_latency:
        case["alpha_s"] = 0.0
    for case in high_latency:
        case["alpha_s"] = rng.uniform(0.6, 2) * case["backward_s"]  # 2(W − 1)α is longer than backward
    best = [got for got, _ in run(probes.best, [*no_latency, *high_latency])]
    assert best[:5] == [1] * 5, f"buckets of {best[:5]} bytes on links without latency: small messages leave sooner"
    totals = [sum(case["sizes"]) for case in high_latency]
    assert best[5:] == totals, (
        f"buckets of {best[5:]} bytes, expected {totals}: where one latency outlasts backward, send everything at once"
    )
