"""Data parallelism whose gradients travel in buckets.

Must hold: training equals that of one process on the whole batch, also with unused, frozen and tied parameters, several
dtypes, and accumulation. Buckets are those of greedy packing in reverse order for the drawn limit. Each is sent during
backward once it is full, and no rank waits before backward ends. Typical fakes: one bucket for all, or one per
parameter (the sizes are exact for a drawn limit); send all in finish (caught by phases, and by the number of messages
sent when backward reaches each layer); wait in the hook (caught by the start of the wait); rely on gradients coming in
parameter order (layers run in a drawn order); keep data of an earlier step (some steps skip layers).
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from lab.harness.diagnose import harmless
from lab.harness.judge import close, measured
from lab.harness.named import number_of
from lab.harness.pytest_plugin import exercise

from . import oracles, probes, probes_wrappers
from .chains import check_model_training, check_training, draw_batches, draw_chain, draw_model, each_step, steps_of
from .oracles import check_waits_after_backward, padded_size, reductions
from .payloads import late_reductions

BUCKETED = "ddp.bucketed"


def sizes(chain) -> list:
    """Return (name, elements, bytes, dtype) per parameter that requires grad, in reverse order."""
    named = [(n, p) for n, p in probes_wrappers.Chain(*chain[:2]).named_parameters() if p.requires_grad]
    return [(n, p.numel(), p.nbytes, str(p.dtype).removeprefix("torch.")) for n, p in reversed(named)]


def packing(chain, limit) -> list[list]:
    """Return the buckets of greedy packing; each has one dtype."""
    return pack(sizes(chain), lambda bytes, new: bytes + new <= limit)


def pack(entries: list, fits: Callable[[int, int], bool]) -> list[list]:
    """Pack entries in order; open a new bucket for another dtype, or if an entry does not fit."""
    buckets: list[list] = []
    for entry in entries:
        if not buckets or buckets[-1][0][3] != entry[3] or not fits(sum(e[2] for e in buckets[-1]), entry[2]):
            buckets.append([])
        buckets[-1].append(entry)
    return buckets


def wrong_packings(chain: tuple, limit: int) -> dict[str, list[list]]:
    """Return the buckets that wrong packing rules give, by rule."""
    entries = sizes(chain)
    uniform = {each: [(name, n, each * n, kind) for name, n, _, kind in entries] for each in (1, 4)}
    return {
        "in the order of parameters(), not in reverse": pack(entries[::-1], lambda bytes, new: bytes + new <= limit),
        "until the limit is exceeded": pack(entries, lambda bytes, new: bytes < limit),
        "below the limit: one that fits exactly fits": pack(entries, lambda bytes, new: bytes + new < limit),
        "at 4 bytes an element, whatever its dtype": pack(uniform[4], lambda bytes, new: bytes + new <= limit),
        "with a limit of elements, not of bytes": pack(uniform[1], lambda bytes, new: bytes + new <= limit),
        "with all there is, whatever the limit": pack(entries, lambda bytes, new: True),
        "with one parameter each": pack(entries, lambda bytes, new: False),
    }


def message_sizes(buckets: list[list], rows: list) -> Counter:
    """Count the messages for these buckets by (dtype, elements)."""
    return Counter((b[0][3], padded_size(sum(e[1] for e in b), rows, 2)) for b in buckets)


@harmless
def explain_packing(sent: Counter, chain: tuple, limit: int, rows: list) -> str:
    """Name the wrong packing rules that give these messages; "" if none does."""
    rules = [rule for rule, buckets in wrong_packings(chain, limit).items() if message_sizes(buckets, rows) == sent]
    return f"; these are buckets filled {', or '.join(rules)}" if rules else ""


def distinct_packings(chain: tuple, limit: int) -> set:
    """Return the distinct packings that the wrong rules give, as elements per bucket."""
    return {tuple(sorted(sum(e[1] for e in b) for b in buckets)) for buckets in wrong_packings(chain, limit).values()}


def draw_limit(rng, chain) -> int:
    """Draw a limit that gives a few buckets of a few parameters."""
    total = sum(e[2] for e in sizes(chain))
    return rng.integers(total // 5, total // 2)


def natural(chain, steps=3) -> list:
    return [[list(range(len(chain[1])))] for _ in range(steps)]


@exercise(BUCKETED, kind="numerics")
@pytest.mark.parametrize(
    ("world", "order", "set_to_none"),
    [(1, "drawn", True), (2, "numbered", False), (2, "drawn", True), (4, "drawn", False), (5, "numbered", True)],
)
def test_training_is_that_of_one_process_on_the_whole_batch(run, rng, expect, world, order, set_to_none):
    chain = draw_chain(rng, world)
    orders = natural(chain) if order == "numbered" else [[rng.shuffled(o)] for (o,) in natural(chain)]
    check_training(run, rng, expect, "bucketed", chain, orders, set_to_none, {"bucket_bytes": draw_limit(rng, chain)})


@exercise(BUCKETED, kind="numerics")
@pytest.mark.parametrize("set_to_none", [True, False, "resting"])
def test_layers_skipped_in_some_steps(run, rng, expect, set_to_none):
    chain = draw_chain(rng, 2)
    layers = list(range(len(chain[1])))
    resting = [rng.shuffled(layers)[: rng.integers(1, len(layers) - 2)] for _ in range(2)]
    orders = [[[i for i in layers if i not in rest]] for rest in (layers[1:], [], *resting, [])]
    check_training(run, rng, expect, "bucketed", chain, orders, set_to_none, {"bucket_bytes": draw_limit(rng, chain)})


@exercise(BUCKETED, kind="numerics")
def test_tied_frozen_and_unused_parameters(run, rng, expect):
    check_model_training(run, rng, "bucketed", *draw_model(rng, 3), expect)


@exercise(BUCKETED, kind="numerics")
def test_dtypes_mixed_in_one_model(run, rng, expect):
    chain = draw_chain(rng, 2, dtypes=("float32", "float64"))
    options = {"bucket_bytes": draw_limit(rng, chain) * 2}
    one_dtype = [list(range(len(chain[1])))[rng.integers(0, 1) :: 2]]  # no layer of the other dtype has a gradient
    check_training(run, rng, expect, "bucketed", chain, [*natural(chain, 2), one_dtype], options=options)


@exercise(BUCKETED, kind="numerics")
@pytest.mark.parametrize("last", ["all", "some"])
def test_accumulation_is_the_sum_of_its_micro_batches(run, rng, expect, last):
    chain = draw_chain(rng, 2)
    layers = list(range(len(chain[1])))
    end = layers if last == "all" else rng.shuffled(layers)[: len(layers) // 2]
    orders = [[rng.shuffled(layers)] * rng.integers(1, 2) + [end], [layers], [layers, end]]
    check_training(run, rng, expect, "bucketed", chain, orders, options={"bucket_bytes": draw_limit(rng, chain)})


@exercise(BUCKETED, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "bucketed")


@exercise(BUCKETED, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "bucketed")


@exercise(BUCKETED, kind="numerics")
def test_in_training_mode_buffers_are_rank_0s(run, rng):
    world, width = rng.integers(2, 3), rng.integers(2, 5)
    states = [{"scale": torch.ones(width), "mean": rng.normal(width), "count": torch.tensor(rng.integers(0, 9))}
              for _ in range(world)]  # fmt: skip
    inputs = [[rng.normal(3, width) for _ in range(2)] for _ in range(world)]
    mean, count, want = states[0]["mean"].double(), int(states[0]["count"]), []
    for call in range(2):
        want.append([inputs[r][call].double() - mean + count for r in range(world)])
        mean, count = mean * 0.5 + inputs[0][call].double().mean(0), count + 1
    traces = run.trace(probes_wrappers.buffers, "bucketed", width, states, inputs, world=world)
    for rank, trace in enumerate(traces):
        local = inputs[rank][0].double() - states[rank]["mean"].double() + int(states[rank]["count"])
        checks = [("evaluation", trace.values["evaluated"], local, "each rank uses the buffers it has")]
        for got, exact in zip(trace.values["outputs"], want, strict=True):
            checks.append(("training", got, exact[rank], "forward first overwrites all buffers with rank 0's"))
        for mode, got, exact, cause in checks:
            close(
                got, exact, exact.float(), f"rank {rank} of {world}, output in {mode} mode", factor=10,
                dims="row, column", cause=f"in {mode} mode {cause}, persistent or not",
            )  # fmt: skip
        (sent,) = trace.cut(["evaluation"])
        assert not sent, f"rank {rank}: forward sent {len(sent)} messages in evaluation mode"


@exercise(BUCKETED, kind="numerics")
def test_a_limit_below_one_byte_is_refused(run, rng):
    limits = [0, -rng.integers(1, 99), 1]
    (errors,) = run(probes_wrappers.refused, limits, world=1)
    want = ["ValueError", "ValueError", "nothing"]
    assert errors == want, f"bucket_bytes {limits}: got {errors}, expected {want}"


@exercise(BUCKETED, kind="property")
@pytest.mark.parametrize("limit", ["drawn", "exact", "tiny", "default"])
def test_buckets_are_packed_greedily_in_reverse_order(run, rng, limit):
    chain = draw_chain(rng, 2)
    exact = sum(e[2] for e in sizes(chain)[: rng.integers(3, 5)])
    total = sum(e[2] for e in sizes(chain))
    drawn = rng.integers(total // 8, total // 5)  # as a limit in elements, it is less than the total
    number = {"drawn": drawn, "exact": exact, "tiny": rng.integers(1, 4), "default": 25 << 20}[limit]
    options = {} if limit == "default" else {"bucket_bytes": number}
    check_packing(run, rng, chain, number, options)


def check_packing(run, rng, chain: tuple, limit: int, options: dict) -> None:
    """Assert that messages have the dtypes and sizes of buckets that are packed greedily."""
    for rank, step, record in each_step(steps_of(run, rng, "bucketed", chain, natural(chain, 2), options)):
        rows = reductions(record["rows"], 2, f"rank {rank}, step {step}")
        sent, want = Counter((r["dtype"], r["elements"]) for r in rows), message_sizes(packing(chain, limit), rows)
        measured(f"sums over ranks in a step, {limit} bucket_bytes", sent.total(), want.total())
        assert sent == want, (
            f"rank {rank}, step {step}: sums over ranks by dtype and number of elements {dict(sorted(sent.items()))}, "
            f"expected {dict(sorted(want.items()))}: parameters are, last one first, "
            f"{[(e[3], e[1]) for e in sizes(chain)]}; at most {limit} bytes in a bucket, and another dtype opens the "
            f"next one{explain_packing(sent, chain, limit, rows)}"
        )


@exercise(BUCKETED, kind="property")
def test_steps_leave_nothing_behind(run, rng):
    oracles.check_nothing_kept(run, rng, "bucketed", {"bucket_bytes": rng.integers(100, 500)})


@exercise(BUCKETED, kind="property")
def test_the_limit_is_one_of_bytes_and_buckets_have_one_dtype(run, rng):
    drawn = []
    for _ in range(40):
        chain = draw_chain(rng, 2, dtypes=("float32", "float64"), layers=6)
        n = sum(e[1] for e in sizes(chain) if number_of(e[0]) == 1)  # in float64, they do not fit in one bucket
        drawn.append((chain, rng.integers(4 * n, 8 * n - 1)))
    chain, limit = max(drawn, key=lambda pair: len(distinct_packings(*pair)))  # wrong rules give other buckets
    check_packing(run, rng, chain, limit, {"bucket_bytes": limit})


@exercise(BUCKETED, kind="property")
@pytest.mark.parametrize("resting", [False, True, "alone"])
def test_a_bucket_is_sent_when_it_is_full(run, rng, resting):
    chain = draw_chain(rng, 2, layers=6)
    limit = 1 if resting == "alone" else draw_limit(rng, chain)  # 1: one bucket per parameter; some stay empty
    layers = list(range(len(chain[1])))
    absent = rng.integers(1, 4) if resting else None
    orders = [[rng.shuffled([i for i in layers if i != absent])] for _ in range(2)]
    buckets = packing(chain, limit)
    incomplete = [any(number_of(e[0]) == absent for e in b) for b in buckets]
    present = [sum(e[1] for e in b if number_of(e[0]) != absent) for b in buckets]
    full = [sum(e[1] for e in b) for b in buckets]
    for rank, step, record in each_step(steps_of(run, rng, "bucketed", chain, orders, {"bucket_bytes": limit})):
        what = f"rank {rank}, step {step}, layers in order {orders[step][0]}"
        rows = reductions(record["rows"], 2, what)
        sent = Counter((r["elements"], r["phase"]) for r in rows)
        # A bucket that did not fill up may be sent with zeros for missing gradients, or without them.
        want, padded = (
            Counter(
                (padded_size(n, rows, 2), "finish" if r else "backward")
                for n, r, m in zip(counts, incomplete, present, strict=True) if m
            )
            for counts in (present, full)
        )  # fmt: skip
        assert sent in (want, padded), (
            f"{what}: sums over ranks by (elements, phase): {dict(sent)}, expected {dict(want)}: a full "
            "bucket leaves during backward, one that could not fill up in finish_gradient_synchronization()"
        )
        late = [layer for row, layer in late_reductions(record) if row["phase"] == "backward"]
        assert not late, (
            f"{what}: {len(late)} buckets were sent when backward had gone on, the first after it had left layer "
            f"{late[0]}, whose gradients filled it: send a bucket in the hook of whichever of its gradients comes last"
        )
        check_waits_after_backward(what, record)


@exercise(BUCKETED, kind="numerics")
@pytest.mark.parametrize("bucket", ["full", "not full"])
def test_a_second_backward_is_refused(run, rng, bucket):
    """A bucket that is not full has not been sent yet, but may already hold divided gradients."""
    values = [[rng.normal(n) for n in (40, 3)] for _ in range(2)]
    options = {"bucket_bytes": 4 * 40} if bucket == "full" else {}
    for rank, got in enumerate(run(probes.two_backwards, "bucketed", values, options, world=2)):
        assert got == "RuntimeError", (
            f"rank {rank}: a second backward before finish_gradient_synchronization(), without no_sync(), raised "
            f"{got}, expected RuntimeError: it adds to gradients that are divided already (their bucket is {bucket})"
        )


@exercise(BUCKETED, kind="property")
def test_backward_does_not_wait_for_messages(run, rng):
    oracles.check_never_waits(run, rng, "bucketed", {"bucket_bytes": rng.integers(20, 60)})


@exercise(BUCKETED, kind="property")
def test_nothing_is_sent_within_no_sync(run, rng):
    chain = draw_chain(rng, 2)
    limit = draw_limit(rng, chain)
    (layers,) = natural(chain, 1)[0]
    orders = [[layers, layers, layers], [layers, layers]]
    bucket_sizes = [sum(e[1] for e in bucket) for bucket in packing(chain, limit)]
    for rank, step, record in each_step(steps_of(run, rng, "bucketed", chain, orders, options={"bucket_bytes": limit})):
        assert record["unsent"] == 0, (
            f"rank {rank}, step {step}: {record['unsent']} messages were sent within no_sync()"
        )
        rows = reductions(record["rows"], 2, f"rank {rank}, step {step}")
        sent = Counter((r["elements"], r["phase"]) for r in rows)
        want = Counter((padded_size(n, rows, 2), "backward") for n in bucket_sizes)
        assert sent == want, (
            f"rank {rank}, step {step} of {len(orders[step])} micro-batches: sums over ranks by (elements, phase): "
            f"{dict(sent)}, expected {dict(want)}: the backward after no_sync() sends the sums, once"
        )
        late = late_reductions(record)
        assert not late, (
            f"rank {rank}, step {step}: {len(late)} of {len(rows)} buckets were sent when the last backward had "
            f"gone on, the first after it had left layer {late[0][1]}, whose gradients filled it"
        )
    batch = [b[0][0] for b in draw_batches(rng, chain[0], 2, [[layers]])]
    for rank, trace in enumerate(run.trace(probes_wrappers.left_by_error, *chain, batch, world=2)):
        within, after, _ = trace.cut(["within", "backward", "finish"])
        assert not within, (
            f"rank {rank}: a backward inside the outer of two nested no_sync(), after the inner one had ended (by an "
            f"exception), sent {len(within)} messages, expected none: leaving one restores what was when it was entered"
        )
        assert after, (
            f"rank {rank}: after no_sync() was left by an exception, backward sent nothing: restore in a finally"
        )


@exercise(BUCKETED, kind="timing")
def test_on_a_link_few_messages_hide_behind_backward(run, rng):
    oracles.check_faster_than_naive(run, rng, "bucketed", bucket=4, layers=16, alpha_s=2e-3)
