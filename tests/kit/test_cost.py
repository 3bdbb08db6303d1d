"""Hardware data, predicted seconds, the simulator, and predicted steps.

Must hold: predictions follow known formulas. Overlap follows from the order of events. A step's FLOPs and bytes equal
those of reference/mesh/accounting.py. No step is faster than its lower bound. Typical fakes: constants without sources,
an overlap factor, an estimate as lower bound.
"""

import itertools
import random
import tomllib
from dataclasses import replace

import pytest

from lab.cluster import steps
from lab.cluster.costs import ring_cost, sent_bytes
from lab.cluster.events import Block, Collective, Compute, Memory, Recv, Send, Wait, flat
from lab.cluster.hardware import TABLE, cluster
from lab.cluster.jobs import (
    MEGATRON_2021,
    MEGATRON_2022,
    MODELS,
    RECOMPUTE,
    TODAY,
    Job,
    Plan,
    Recipe,
    gpt,
    of_config,
    unfit,
)
from lab.cluster.prices import collective_s, group_s
from lab.cluster.simulator import SimulationError, play
from lab.model.transformer import Config
from reference.mesh.accounting import Degrees, Workload, accounting

A100 = cluster("dgx-a100", 64)
KIT = Recipe(
    element=4, gradient=4, optimizer=8, sequence=False, overlap_tensor=False, overlap_messages=False, overlap_data=False
)


def test_each_number_has_its_source():
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    for kind in ("device", "link"):
        for name, entry in [*table[kind].items(), (f"every {kind}", table["every"][kind])]:
            missing = entry.keys() - {"name", "sources", "matmul_shape"} - entry["sources"].keys()
            assert not missing, f"{name}: {missing} without one"


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [("dgx-1000", 8, "expected one of dgx-a100"), ("dgx-a100", 12, "a multiple of it"), ("dgx-a100", 0, "at most 8")],
)
def test_invalid_cluster_name_or_size_is_refused(name, gpus, words):
    with pytest.raises(ValueError, match=words):
        cluster(name, gpus)


def test_collective_price_depends_on_group_placement():
    inside, between = A100.inside, A100.between
    n = 1e9
    near = collective_s(Collective("all_reduce", n, range(8)), A100)
    assert near == pytest.approx(inside.base_s + ring_cost("all_reduce", n, 8, inside.alpha_s, 1 / inside.bytes_per_s))
    far = collective_s(Collective("all_reduce", n, range(0, 64, 8)), A100)  # one rank per node, with one card
    assert far == pytest.approx(2 * 7 / 8 * n / between.bytes_per_s, rel=0.01)
    spread = collective_s(Collective("all_reduce", n, range(64)), A100)  # eight cards per node share the bytes
    assert near < spread < far / 5
    tree_s = group_s("all_reduce", 1e3, 512, 1, cluster("dgx-a100", 4096))
    assert tree_s < 0.2 * 2 * 511 * between.alpha_s, "a tree is faster than a ring where latency is all there is"
    assert group_s("all_gather", 1e6, 1, 1, A100) == 0
    crossing = group_s("all_to_all", n, 2, 8, A100)  # eight of 16 parts go to the other node, by each rank's own card
    assert crossing == pytest.approx(8 / 16 * n / between.bytes_per_s, rel=0.01)


def compute(seconds: float) -> Compute:
    device = A100.device
    traffic = (seconds - device.kernel_s) * device.layer_share * device.hbm_bytes_per_s * device.hbm_share
    return Compute(0, traffic)


def gather(handle: int | None = None) -> Collective:
    return Collective("all_gather", 1e9, range(0, 64, 8), label="data", handle=handle)


def test_asynchronous_collectives_overlap_compute():
    c, g = 1.0, collective_s(gather(), A100)
    assert play({0: (gather(), compute(c))}, A100).step_s == pytest.approx(c + g)
    assert play({0: (gather(1), compute(c), Wait(1))}, A100).step_s == pytest.approx(max(c, g))
    twice = (gather(1), gather(2), compute(c), Wait(1), Wait(2))  # one after the other, on one stream
    assert play({0: twice}, A100).step_s == pytest.approx(max(c, 2 * g))
    block = Block((gather(1), compute(0.1), Wait(1), Memory("buffers", 5.0)), times=3)
    assert play({0: (block,)}, A100).step_s == pytest.approx(3 * max(0.1, g))
    outcome = play({0: (gather(1), compute(c / 100), Wait(1))}, A100)
    assert sum(outcome.by_rank[0].values()) == pytest.approx(outcome.step_s)
    assert outcome.by_rank[0]["data"] == pytest.approx(g - c / 100)


def test_simulated_receive_waits_for_send_and_transfer():
    send, receive = Send(8, 23.5e9, ("x", 0, 0)), Recv(0, 23.5e9, ("x", 0, 0))
    outcome = play({0: (compute(0.5), send, compute(3.0)), 8: (receive, compute(0.25))}, A100)
    assert outcome.step_s == pytest.approx(3.5)
    assert outcome.by_rank[8]["bubble"] == pytest.approx(0.5 + 3.5 - 1.75, rel=1e-3)
    assert outcome.by_rank[8]["pipe"] == pytest.approx(1.0, rel=1e-3)
    both = Collective("all_reduce", 1e6, (0, 8), label="tied")
    outcome = play({0: (compute(2.0), both), 8: (both,)}, A100)
    assert outcome.by_rank[8]["bubble"] == pytest.approx(2.0)
    with pytest.raises(SimulationError, match="deadlock: rank 8 waits for x 0 0 of rank 0"):
        play({0: (compute(1.0),), 8: (receive,)}, A100)


def test_rank_with_async_handle_runs_on_until_its_wait():
    """A rank may issue a collective early and asynchronously, although another rank joins late."""
    both = Collective("all_reduce", 1e9, (0, 8), label="early", handle=1)
    g = collective_s(both, A100)
    late = (Recv(0, 1e3, ("x", 0, 0)), compute(2.0), replace(both, handle=None))
    outcome = play({0: (both, Send(8, 1e3, ("x", 0, 0)), compute(1.0), Wait(1)), 8: late}, A100)
    assert outcome.step_s == pytest.approx(2.0 + g, rel=1e-3)
    assert outcome.by_rank[0]["early"] == pytest.approx(1.0 + g, rel=1e-3)
    with pytest.raises(SimulationError, match="rank 0 waits in all_reduce; rank 8 waits for x 0 0 of rank 0"):
        play({0: (both, Wait(1), Send(8, 1e3, ("x", 0, 0))), 8: late}, A100)


def draw(rng: random.Random) -> tuple[Config, Job, Plan]:
    tensor, data, pipe = (rng.choice([1, 2, 4]) for _ in range(3))
    kv_heads = tensor * rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 2])
    micro_batch, micro_batches = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    config = Config(
        layers=pipe * rng.choice([1, 2, 3]), width=2 * heads * rng.choice([2, 3, 4]), heads=heads, kv_heads=kv_heads,
        hidden=tensor * rng.randrange(3, 30), vocabulary=tensor * rng.randrange(5, 50),
        context=2 * rng.randrange(2, 40),
    )  # fmt: skip
    hardware = cluster("dgx-a100", data * pipe * tensor)
    job = Job(of_config(config), data * micro_batch * micro_batches, config.context, hardware, KIT)
    return config, job, Plan(data, pipe, tensor, micro_batch, 1, "none", rng.choice([0, 3]) if data > 1 else 0)


def test_flops_bytes_and_parameters_are_those_of_accounting():
    rng = random.Random(0)
    for config, job, plan in (draw(rng) for _ in range(40)):
        work = Workload(config, job.sequences, config.context, plan.micro_batches(job))
        for stage, program in enumerate(steps.programs(job, plan).values()):
            degrees = Degrees(data=plan.data, pipe=plan.pipe, tensor=plan.tensor)
            want = accounting(work, degrees, stage=stage, fsdp=plan.zero == 3)
            events = list(flat(program))
            shards = plan.data if plan.zero else 1
            (step,) = (e for e in events if isinstance(e, Compute) and e.label == "AdamW")
            assert step.bytes == pytest.approx(KIT.step_traffic * want.parameters / shards), (plan, stage)
            assert sum(e.flops for e in events if isinstance(e, Compute)) == want.flops, (plan, stage)
            sent = dict.fromkeys(("tensor", "data", "gradient norm"), 0.0)
            for e in events:
                if isinstance(e, Collective):
                    sent[e.label] += sent_bytes(e.op, e.bytes, len(e.ranks))
            assert sent["tensor"] == pytest.approx(want.bytes["tensor"]), (plan, stage)
            assert sent["data"] == pytest.approx(want.bytes["data"] + want.bytes["data×expert"]), (plan, stage)
            assert sum(e.bytes for e in events if isinstance(e, Send)) == want.bytes["pipe"], (plan, stage)
            gpus = job.cluster.gpus  # clipping all-reduces one float32 over all ranks
            assert sent["gradient norm"] == pytest.approx(sent_bytes("all_reduce", 4, gpus)), (plan, stage)


@pytest.mark.parametrize("model", [MODELS["8b"], gpt(8, 1024, 16)])
def test_a_parameter_takes_18_bytes_and_zero_divides_them(model):
    """2 bytes for itself, 4 for its gradient, 12 for AdamW (a float32 copy and two moments). There is one stage."""
    job = Job(model, 8, 1024, cluster("dgx-h100", 8))
    want = {"parameters": 2, "gradients": 4, "optimizer": 12}
    for zero in range(4):
        got = steps.memory(job, Plan(8, zero=zero))
        for (kind, size), level in zip(want.items(), (3, 2, 1), strict=True):
            assert got[kind] == pytest.approx(size * model.parameters / (8 if zero >= level else 1)), (kind, zero)


@pytest.mark.parametrize(
    ("plan", "alive"),
    [
        (Plan(1, 8, 1, 1), 8),  # 1F1B: one per stage
        (Plan(1, 8, 1, 8), 4),  # at most the number of micro-batches
        (Plan(1, 8, 1, 1, 2), 2 * 7 + 8 + 1),
        (Plan(1, 8, 1, 1, 4, "full"), 2 * 7 + 3 * 8 + 1),
        (Plan(8, 1, 1, 1), 1),
    ],
)
def test_activation_memory_counts_micro_batches_in_flight(plan, alive):
    """Counts forwards without backward on the first stage, also in its program."""
    job = Job(replace(gpt(32, 1024, 16), vocabulary=8), 32, 1024, cluster("dgx-h100", 8))
    peak = now = 0
    for event in steps.programs(job, plan)[0]:
        if isinstance(event, Block) and event.name in ("forward", "backward"):
            now += 1 if event.name == "forward" else -1
            peak = max(peak, now)
    total, kept = steps.activation_bytes(job, 1, plan.micro_batch, plan.recompute)
    layers = 32 // plan.pipe // plan.chunks
    want = alive * layers * kept + (total if plan.recompute == "full" else 0)
    assert steps.memory(job, plan)["activations"] == pytest.approx(want)
    if plan.data == 1:  # otherwise messages of the data axis divide a chunk into several blocks
        assert peak == alive


def test_activation_memory_matches_korthikanti():
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    model, hardware = gpt(48, h, a), cluster("dgx-a100", 8)
    for recipe, total in (
        (MEGATRON_2022, s * b * h / t * (34 + 5 * a * s / h)),  # equation 4
        (MEGATRON_2021, s * b * h * (10 + 24 / t + 5 * a * s / h / t)),  # equation 2
    ):
        job = Job(model, 4, s, hardware, recipe)
        assert steps.activation_bytes(job, t, b, "none") == pytest.approx((total, total))
        full = 2 * s * b * h / (t if recipe.sequence else 1)
        assert steps.activation_bytes(job, t, b, "full")[1] == pytest.approx(full)
        core = 5 * a * s * s * b / t
        assert steps.activation_bytes(job, t, b, "selective")[1] == pytest.approx(total - core)


@pytest.mark.parametrize("zero", range(4))
def test_data_parallel_traffic_overlaps_the_layers(zero):
    """Messages do not all wait for the last layer, even with one chunk."""
    job = Job(MODELS["8b"], 64, 4096, cluster("dgx-h100", 64))
    plan = Plan(64, 1, 1, 1, 1, "full", zero)
    prices = {flag: steps.price(replace(job, recipe=replace(TODAY, overlap_data=flag)), plan) for flag in (True, False)}
    assert prices[True].causes["data"] < 0.25 * prices[False].causes["data"]
    assert prices[True].step_s < prices[False].step_s - 0.7 * prices[False].causes["data"]


@pytest.mark.parametrize("recipe", [TODAY, MEGATRON_2021, MEGATRON_2022])
def test_no_price_is_below_its_floor_and_causes_add_up(recipe):
    job = Job(gpt(14, 1024, 16), 48, 512, cluster("dgx-a100", 16), recipe)
    sizes = 3 * [(1, 2, 4, 8, 16)]
    plans = itertools.starmap(Plan, itertools.product(*sizes, (1, 2, 3), range(1, 5), RECOMPUTE, range(4)))
    for plan in random.Random(1).sample([plan for plan in plans if not unfit(job, plan)], 60):
        price = steps.price(job, plan)
        assert steps.floor_s(job, plan) <= price.step_s * (1 + 1e-12), plan
        assert sum(price.causes.values()) == pytest.approx(price.step_s), plan
        if plan.data == plan.pipe == 1:  # no other rank to wait for
            assert steps.floor_s(job, plan) == pytest.approx(price.step_s), plan
