"""The same transformer on any mesh.

Must hold: on each axis, each pair of axes and all four, a few steps have the losses of one process on the same
micro-batches, and the first step has its gradients. Each number of the model is on some rank, and no rank holds more
than its share. Messages along each axis have the bytes that the accounting predicts. Two runs are equal bit for bit.
Typical fakes: the whole model on every rank (caught by counting elements); groups along the wrong axis; a loss averaged
per rank; a balancing loss that stays on its stage; a head that drifts from its tied embedding; dropout that differs
between ranks with the same activations, or is equal on ranks with different tokens; another schedule than requested; a
placement that reports wrong copies to norms and checkpoints.
"""

import itertools
import math
from collections import defaultdict

import pytest
import torch

from lab.cluster.costs import sent_bytes
from lab.harness.judge import measured, never_holds
from lab.harness.pytest_plugin import exercise

from . import probes_compose as probes
from .compose import bare, check, check_same_training, compare, draw_model, draw_run, members, model_for, with_dropout
from .costs import listed
from .probes_placed import AXES, coordinate, names_at, part_of

COMPOSE = "mesh.compose"
ALL = dict.fromkeys(AXES, 2)
HOARDERS = ["mesh.parallel_linear", "mesh.parallel_attention", "mesh.vocab_parallel", "mesh.fsdp_axis"]  # as stand-ins


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("axis", ["none", *AXES])
def test_each_axis_alone(run, rng, expect, axis):
    ranks = rng.integers(2, 3)
    degrees = {} if axis == "none" else {axis: ranks}
    plan = {"micro_batches": 5 - ranks, "balance": 0.1}  # differs from ranks, so a wrong factor names its cause
    check(run, rng, expect, degrees, plan, model_for(rng, degrees), rows=2)


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("pair", list(itertools.combinations(AXES, 2)), ids=" × ".join)
def test_every_pair_of_axes(run, rng, expect, pair):
    degrees = dict.fromkeys(pair, 2)
    plan = {"micro_batches": rng.choice([1, 3]), "schedule": rng.choice(["gpipe", "1f1b"]), "balance": 0.1}
    check(run, rng, expect, degrees, plan, model_for(rng, degrees))


MIXTURE = {"experts": 3, "k": 2}
LIMITED = {"experts": 4, "k": 2, "factor": 0.5}  # each rank has a limit for its own tokens, also each tensor rank
UNEVEN = {"sizes": {"layers": 5}}
ROUND = {"micro_batches": 4, "schedule": "interleaved", "chunks": 2}
SEQUENCE = {"micro_batches": 4, "sequence": True}
CASES = {  # mesh, plan, changes of the model
    "all four, sharded": (ALL, {"fsdp": True}, {}),
    "all four, with a capacity": (ALL, {"sequence": True}, LIMITED),
    "experts together": ({"data": 2, "pipe": 2, "tensor": 2}, {"micro_batches": 3}, MIXTURE),  # yet one balancing loss
    "sequence × pipe": ({"pipe": 2, "tensor": 3}, SEQUENCE, {}),
    "sequence × expert": ({"expert": 2, "tensor": 3}, SEQUENCE, {}),
    "sequence × expert, sharded": ({"expert": 2, "tensor": 3}, {**SEQUENCE, "fsdp": True}, {}),
    "sequence × data, sharded": ({"data": 2, "tensor": 3}, {**SEQUENCE, "fsdp": True}, {}),
    "tied across stages": ({"data": 2, "pipe": 2}, {}, {"tied": True}),
    "tied across stages, sharded": ({"data": 2, "pipe": 2}, {"fsdp": True}, {"tied": True}),
    "tied on one stage": ({"data": 2, "tensor": 2}, {}, {"tied": True}),
    "tied on one stage, sharded": ({"data": 2, "tensor": 2}, {"fsdp": True}, {"tied": True}),
    "interleaved": ({"pipe": 2, "expert": 2}, ROUND, UNEVEN),
    "interleaved, sharded": ({"pipe": 2, "expert": 2}, {**ROUND, "fsdp": True}, UNEVEN),
}


@exercise(COMPOSE, kind="numerics")
@pytest.mark.parametrize("case", CASES)
def test_axes_with_options(run, rng, expect, case):
    degrees, plan, changes = CASES[case]
    plan, model = {"micro_batches": 2, "balance": 0.1, "small": 0, **plan}, model_for(rng, degrees, plan)
    model |= {**changes, "sizes": model["sizes"] | changes.get("sizes", {})}
    check(run, rng, expect, degrees, plan, model, steps=3, rows=2)


@exercise(COMPOSE, kind="numerics")
def test_clipping_comes_between_gradients_and_step(run, rng, expect):
    degrees = {"data": 2, "pipe": 2}
    model = draw_model(rng, layers=2)
    state, (batch,), want = draw_run(rng, expect, model, degrees, {}, 1)
    for rank, got in enumerate(run(probes.clipped, model, state, degrees, {}, batch, world=4)):
        assert got["calls"] == [True], f"rank {rank}: clip was called {got['calls']}, expected once, with all gradients"
        assert got["change"] == 0, (
            f"rank {rank}: clip has set all gradients to 0, and a parameter moved by {got['change']}"
        )
        compare(got["gradients"], want["gradients"], degrees, rank, "what clip is given: gradient")


@exercise(COMPOSE, kind="property")
def test_no_rank_holds_more_than_its_share(run, rng, replaced):
    """The model has experts, on all axes. FSDP pads by less than one number per unit and rank."""
    model = model_for(rng, ALL)
    state, plans = bare(model).state_dict(), [{}, {"fsdp": True, "small": 0}]
    hoarding = replaced(HOARDERS)
    tables = 4 * model["sizes"]["context"] * model["sizes"]["width"] // model["sizes"]["heads"]  # cos and sin
    layout = {"degrees": ALL, "layers": model["sizes"]["layers"], "experts": model["experts"], "tied": False}
    for rank, got in enumerate(run(probes.held_bytes, model, ALL, plans, world=16)):
        coord = coordinate(ALL, rank)
        share = [part_of(n, state[n], coord["tensor"], 2).numel() for n in names_at(state, coord, layout)]
        for live, shards in zip(got, (1, 2), strict=True):
            limit = 4 * (sum(share) if shards == 1 else sum(share) // shards + len(share)) + tables
            limit += 4 * sum(t.numel() for t in state.values()) * bool(hoarding)
            measured(f"bytes held by a rank of 16, data sharded over {shards}", live, limit, "bytes", at_most=True)
            assert live <= limit, (
                f"rank {rank} at {coord}{', data sharded' * (shards > 1)}: {live} bytes are held when the model has "
                f"been parallelized, expected at most {limit}: parts of other stages, experts, tensor or data ranks "
                "are here, or wholes of which its parameters are views"
            )


@exercise(COMPOSE, kind="property")
@pytest.mark.parametrize(("axes", "plan"), [(("pipe", "tensor"), {}), (("data", "expert"), {"fsdp": True, "small": 0})])
def test_no_rank_holds_other_parts_elsewhere(run, rng, replaced, axes, plan):
    """The kernel measures a larger model, so memory outside torch counts too."""
    seed, degrees, traces = rng.integers(0, 10**6), dict.fromkeys(axes, 2), []
    for width, layers in ((8, 2), (256, 14 if "expert" in axes else 20)):
        model = {"experts": 2 * ("expert" in axes), "k": 1, "sizes": {
            "layers": layers, "width": width, "heads": 4, "kv_heads": 4, "hidden": 3 * width, "vocabulary": 64,
            "context": 8,
        }}  # fmt: skip
        state = probes.refilled(bare(model), seed).state_dict()
        full = sum(t.nbytes for t in state.values())
        traces.append(run.trace(probes.weighed, model, degrees, plan, seed, 2 * full, world=4))
    allowed = full * bool(replaced(HOARDERS)) + full // (2 if "expert" in axes else 4)
    for rank, trace in enumerate(traces[1]):
        index, ranks = coordinate(degrees, rank)["tensor"], degrees.get("tensor", 1)
        for name, start, count, total in trace.values:
            true = part_of(name, state[name], index, ranks).flatten()[start : start + count].double()
            assert abs(total - true.sum()) <= 1e-5 * true.abs().sum(), f"rank {rank} of 4: {name} has other numbers"
        what = f"rank {rank} of 4: all parts of the model: free the others, and what its parameters are views of;"
        never_holds(trace, traces[0][rank], what, full - allowed, 2 * full + allowed)


@exercise(COMPOSE, kind="property")
@pytest.mark.parametrize(
    ("degrees", "fsdp"),
    [({"data": 2, "tensor": 2}, False), ({"pipe": 2, "tensor": 2}, False), ({"data": 2, "expert": 2}, False),
     ({"data": 2, "pipe": 2}, True), ({"data": 2, "expert": 2, "tensor": 2}, True), (ALL, False)],
    ids=str,
)  # fmt: skip
def test_bytes_along_each_axis_are_those_of_the_accounting(run, rng, expect, replaced, degrees, fsdp):
    """Bytes of one step. In addition, ranks send only the loss over data × pipe × expert, 4 bytes."""
    experts, micro_batches = 4 if "expert" in degrees else 0, 2
    sizes = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 8, "vocabulary": 16, "context": 4}
    model = {"sizes": sizes, "experts": experts, "k": experts or 1, "tied": False}
    plan = {"micro_batches": micro_batches, "fsdp": fsdp, "small": 0}
    rows = 8 // micro_batches // degrees.get("data", 1) // degrees.get("expert", 1)
    ranks = check(run, rng, expect, degrees, plan, model, steps=1, rows=rows)
    work = {"sequences": 8, "context": 4, "micro_batches": micro_batches, "experts": experts, "k": model["k"]}
    for rank, got in enumerate(ranks):
        case = {
            "config": sizes, "work": work, "degrees": dict.fromkeys(AXES, 1) | degrees, "fsdp": fsdp,
            "stage": coordinate(degrees, rank)["pipe"],
        }  # fmt: skip
        loss_ranks = members(degrees, rank, ("data", "pipe", "expert"))
        cost = listed(case) | {"data×pipe×expert": sent_bytes("all_reduce", 4, len(loss_ranks))}
        want, found = defaultdict(float), defaultdict(float)
        for axis in (*AXES, "data×expert", "data×pipe×expert"):
            want[members(degrees, rank, tuple(axis.split("×")))] += cost[axis]
        for row in got["sent"]["step 0"]:
            found[tuple(row["group"])] += sent_bytes(row["op"], row["bytes"], len(row["group"]))
        for group in want.keys() | found.keys():
            axes = [axis for axis in AXES if len({coordinate(degrees, r)[axis] for r in group}) > 1]
            assert abs(want[group] - found[group]) < 0.5 or replaced(), (  # a stand-in sends more than it must
                f"rank {rank} at {coordinate(degrees, rank)}: {found[group]:,.0f} bytes over {group} "
                f"({' × '.join(axes)}), the accounting says {want[group]:,.0f}"
            )


@exercise(COMPOSE, kind="property")
def test_two_runs_are_equal_to_the_bit(run, rng, expect):
    degrees, plan = {rng.choice(["data", "expert"]): 2, "tensor": 2}, {"micro_batches": 2, "sequence": True}
    model = model_for(rng, degrees)
    state, batches, _ = draw_run(rng, expect, model, degrees, plan, 2)
    one, two = (run(probes.trained, model, state, degrees, plan, batches, world=4) for _ in "12")
    for rank, (a, b) in enumerate(zip(one, two, strict=True)):
        assert a["losses"] == b["losses"], f"rank {rank}: losses {a['losses']}, then {b['losses']}"
        for (name, _, _, first), (_, _, _, second) in zip(a["parameters"], b["parameters"], strict=True):
            assert torch.equal(first, second), f"rank {rank}: {name} differs between two runs"


@exercise(COMPOSE, kind="property")
@pytest.mark.parametrize("sequence", [False, True])
def test_random_numbers_are_alike_where_activations_are(run, rng, sequence):
    degrees = dict.fromkeys(rng.shuffled(["data", "pipe", "expert"])[:2], 2) | {"tensor": 2}
    plans = [{"seed": seed, "sequence": sequence} for seed in rng.shuffled(range(99))[:2]]
    draws = run(probes.drawn, model_for(rng, degrees), degrees, plans, world=8)
    for rank, (first, after) in ((rank, drawn) for rank, rank_draws in enumerate(draws) for drawn in rank_draws):
        assert first == after, f"rank {rank} draws {first} once parallelized, and {after} from rank_seed's seed"
    firsts = [[first for first, _ in rank_draws] for rank_draws in draws]
    ranks = [first for first, _ in firsts]
    for rank, (one, other) in enumerate(firsts):
        assert one != other, f"rank {rank} draws alike with seeds {plans[0]['seed']} and {plans[1]['seed']} of the plan"
    for a, b in itertools.combinations(range(8), 2):
        coord_a, coord_b = coordinate(degrees, a), coordinate(degrees, b)
        alike = not sequence and {**coord_a, "tensor": 0} == {**coord_b, "tensor": 0}
        assert (ranks[a] == ranks[b]) == alike, (
            f"ranks {a} at {coord_a} and {b} at {coord_b} draw {'alike' if ranks[a] == ranks[b] else 'otherwise'}: "
            f"{'they hold the same activations' if alike else 'they hold other activations'}"
        )


@exercise(COMPOSE, kind="property")
@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_on_a_whole_mesh(run, rng, expect, sequence):
    """Losses and gradients are those of one process with the ranks' dropout masks."""
    degrees = {"data": 2, "pipe": 2, "tensor": 2}
    plan = {"micro_batches": 2, "dropout": 0.5, "sequence": sequence}
    model = draw_model(rng, 2, 3)
    state, batches, _ = draw_run(rng, expect, model, degrees, plan, steps=2, rows=2)
    ranks = run(probes.trained, model, state, degrees, plan, batches, world=8)
    masks = [got["masks"] for got in ranks]
    for rank, drawn in enumerate(masks):
        sites = (3, 1)[coordinate(degrees, rank)["pipe"]]  # after embedding and two blocks; after the third block
        assert len(drawn) == 4 * sites, f"rank {rank} dropped {len(drawn)} times, expected 2 steps × 2 × {sites}"
        assert not all(bool(mask.all()) for mask in drawn), (
            f"rank {rank}: with dropout of 0.5 nothing was dropped: are p and training of each nn.Dropout right?"
        )
        assert not all(torch.equal(a, b) for a, b in zip(drawn, drawn[2 * sites :], strict=False)), (
            f"rank {rank} drops the same in both steps: seed once, when the model is parallelized, not in each step"
        )
    check_same_training(ranks, with_dropout(model, state, batches, degrees, plan, masks), degrees, "dropout 0.5")


@exercise(COMPOSE, kind="property")
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_what_runs_is_the_schedule_of_the_plan(run, rng, expect, replaced, schedule, chunks):
    degrees, plan = {"pipe": 2}, {"micro_batches": 4, "schedule": schedule, "chunks": chunks}
    model = draw_model(rng, layers=2 * chunks)
    state, batches, want = draw_run(rng, expect, model, degrees, plan, 1)
    traces = run.trace(probes.trained, model, state, degrees, plan, batches, True, world=2)
    check_same_training([trace.values for trace in traces], want, degrees, schedule)
    for rank, trace in enumerate(traces):
        ran, planned = [gate.name for gate in trace.gates[1:]], trace.values["planned"]
        assert ran == planned or replaced(["mesh.execute"]), (
            f"rank {rank}: {schedule} says {planned}, and what ran (by chunk) was {ran}"
        )


@exercise(COMPOSE, kind="property")
@pytest.mark.parametrize(("degrees", "experts"), [(ALL, 2), ({"data": 2, "tensor": 2}, 0)], ids=["mixture", "dense"])
def test_placements_tell_who_has_copies(run, rng, replaced, degrees, experts):
    """Norms and checkpoints rely on placements: exactly the ranks along the named axes hold the same numbers."""
    model = {**draw_model(rng, 2, 2, experts=experts), "tied": True}
    plans = [{}, {"fsdp": True, "small": 0}, {"fsdp": True}]  # in the last, all layers are small
    shapes = {name: t.shape for name, t in bare(model).state_dict().items() if name != "head.weight"}
    ranks = run(probes.placed, model, degrees, plans, world=math.prod(degrees.values()))
    for number, plan in enumerate(plans):
        holders, found = defaultdict(set), []
        for rank, got in enumerate(ranks):
            assert got[number]["config"] == model["sizes"], f"rank {rank}: config {got[number]['config']}"
            for name, dim, start, count, copies in got[number]["pieces"]:
                index = coordinate(degrees, rank)["tensor"]
                cuts = zip(part_of(name, torch.empty(shapes[name]), index, 2).shape, shapes[name], strict=True)
                cut = next((d for d, (part, full) in enumerate(cuts) if part != full), None)
                assert dim == cut, f"{plan}, rank {rank}: tensor has cut {name} along {cut}, placements() says {dim}"
                key = name, index if cut is not None else 0, start, count
                holders[key].add(rank)
                found.append((rank, key, copies))
        for rank, key, copies in found:
            named = set(members(degrees, rank, tuple(copies)))
            assert named == holders[key], (
                f"{plan}, rank {rank}: {key[0]} from {key[2]} is said to be on ranks {sorted(named)}, along {copies}, "
                f"and is on {sorted(holders[key])}: what other ranks have copies of needs FSDP units of its own"
            )
            sharded = "data" not in copies
            assert sharded == (plan.get("small") == 0) or replaced(), (
                f"{plan}, rank {rank}: {key[0]} is {'' if sharded else 'not '}sharded: with fsdp a layer of plan.small "
                "numbers or more is, and no other"
            )


@exercise(COMPOSE, kind="property")
def test_what_does_not_divide_is_refused_in_one_line(run, rng):
    sizes = draw_model(rng, 2)["sizes"]
    three = {"sizes": sizes, "experts": 3, "k": 1}
    dense = {"sizes": sizes, "experts": 0, "k": 1}
    odd = {"sizes": {**sizes, "heads": 3, "kv_heads": 3, "width": 12}, "experts": 0, "k": 1}
    wide = {**dense, "sizes": {**sizes, "hidden": 7}}
    deep = {"schedule": "interleaved", "chunks": sizes["layers"] + 1}
    tied = {**dense, "tied": True}, {"fsdp": True, "schedule": "interleaved", "chunks": 2}
    cases = [[three, {}], [odd, {}], [wide, {}], [dense, deep], [*tied], [dense, {"micro_batches": 3}, 4]]
    ranks = run(probes.refused, [{"expert": 2, "tensor": 2}, *cases], world=4)
    expected = [("experts", "3"), ("heads", "3"), ("7",), ("stage", "layers"), ("chunk", "tied"), ("micro", "3")]
    for rank, errors in enumerate(ranks):
        for error, words in zip(errors, expected, strict=True):
            fine = error.startswith("ValueError: ") and all(word in error for word in words) and "\n" not in error
            assert fine, f"rank {rank}: {error}; expected a ValueError of one line that has {' and '.join(words)}"
