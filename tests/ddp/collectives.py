"""Inputs for the tests of collectives, and the checks that these tests share."""

import itertools
from collections.abc import Sequence
from functools import partial

import torch

from lab.harness.diagnose import harmless, looks_like, pattern
from lab.harness.judge import measured, never_holds

from . import probes_collectives
from .probes_collectives import case_of, results, rubbish

SUM_DTYPES = [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.int32]
COPY_DTYPES = [*SUM_DTYPES, torch.uint8, torch.bool]
SUM_OPS = ("ring_reduce_scatter", "ring_all_reduce")
CAUSES = {
    "broadcast": "every rank ends with what src had",
    "ring_all_gather": "the output has all parts, in rank order",
    "ring_reduce_scatter": "rank r gets part r of the sum",
    "ring_all_reduce": "the sum over ranks is expected in place",
    "all_to_all": "outputs[s] on rank r is inputs[r] of rank s, and one's own is copied",
}


def run_cases(run, op, cases, members=(), by_rounds=False) -> list:
    """Return results and messages per rank and case; fail if a rank used more than point-to-point messages."""
    ranks, world = [], len(cases)
    traces = run.trace(probes_collectives.collect, op, cases, list(members), world=world, by_rounds=by_rounds)
    for rank, trace in enumerate(traces):
        parts = trace.cut([f"case {i}" for i in range(len(trace.values))])
        ranks.append(
            [{**value, "rows": rows, "rounds": trace.rounds} for value, rows in zip(trace.values, parts, strict=True)]
        )
        sends([row.plain() for row in trace.messages], f"{op}, rank {rank} of {world}")
    return ranks


def draw(rng, op, ranks, world, shapes=(), dtypes=(), sources=()) -> list:
    """Draw cases[rank][case], as `case_of` makes them.

    world: group size. shapes (of parts, where an operation has parts), dtypes: drawn by default. sources: 0 by default.
    """
    shapes = shapes or [[1], [rng.integers(2, 9)], [rng.integers(1, 4), rng.integers(1, 4)], [rng.integers(2, 3), 2, 3],
                        [0]]  # fmt: skip

    sources, dtypes = sources or [0] * len(shapes), dtypes or draw_dtypes(rng, len(shapes), op)
    cases = [*zip(shapes, [partial(draw_values, rng, dtype) for dtype in dtypes], sources, strict=True)]
    return [[case_of(op, shape, world, values, src) for shape, values, src in cases] for _ in range(ranks)]


def draw_dtypes(rng, count, op) -> list:
    """Draw `count` dtypes, each about equally often."""
    return [t for _ in range(count) for t in rng.shuffled(SUM_DTYPES if op in SUM_OPS else COPY_DTYPES)][:count]


def draw_values(rng, dtype, shape) -> torch.Tensor:
    values = rng.normal(*shape)
    if dtype in (torch.bool, torch.uint8):
        return values > 0 if dtype == torch.bool else (values.abs() * 1000 % 256).to(dtype)
    return values.to(dtype) if dtype.is_floating_point else (values * 1000).to(dtype)


def draw_members(rng, size=3, world=5) -> list:
    """Draw a group whose group ranks differ from its global ranks."""
    return sorted(rng.shuffled(range(1, world))[:size])


def check_results(run, op, cases, members=(), by_rounds=False) -> list:
    """Assert right results on the group's ranks (all ranks if `members` is empty); return the result of run_cases."""
    ranks, group = run_cases(run, op, cases, members, by_rounds), members or range(len(cases))
    for index, rank in enumerate(group):
        for i, result in enumerate(ranks[rank]):
            replaced = result.get("replaced")
            assert not replaced, f"rank {index}: outputs{replaced} are other tensors now: fill those that were there"
            terms = summands(op, [cases[r][i] for r in group], index)
            for number, (got, parts) in enumerate(zip(results(result), terms, strict=True)):
                in_place = "tensor" in result and "output" not in result
                before = cases[rank][i]["tensor"] if in_place else rubbish(got.shape, got.dtype)
                note = {"all_to_all": f", outputs[{number}]", "broadcast": f", src {cases[rank][i].get('src')}"}
                what = f"rank {index} of {len(group)}{note.get(op, '')}, shape {[*parts[0].shape]} of {parts[0].dtype}"
                check_sum(got, parts, what, CAUSES[op], before, result["rows"])
    return ranks


def check_all_send_at_once(run, rng, op, steps) -> None:
    """Assert that ranks do not take turns. The switch answers once all ranks wait, which ends a round. At most two
    rounds per step are allowed: every other rank may receive before it sends."""
    world = 4
    shapes = [[world * rng.integers(3, 6), 2]]
    rounds = check_results(run, op, draw(rng, op, world, world, shapes), by_rounds=True)[0][0]["rounds"]
    measured(f"rounds for {world} ranks", rounds, 2 * steps, at_most=True)
    assert rounds <= 2 * steps, (
        f"{world} ranks need {rounds} rounds of messages for {steps} steps, expected at most {2 * steps}: in each step "
        "all ranks send at once; here some rank sends only after it has received"
    )


def check_inputs_unchanged(run, op, cases) -> None:
    """Assert that a call does not change its inputs."""
    for rank, got in enumerate(run_cases(run, op, cases)):
        for result, case in zip(got, cases[rank], strict=True):
            inputs = ([each["tensor"]] if "tensor" in each else each["inputs"] for each in (result, case))
            for now, before in zip(*inputs, strict=True):
                check_sum(now, [before], f"rank {rank}, input of {before.dtype}", "it is not to be changed")


def check_sum(got, parts, what, cause, before=None, rows=()) -> None:
    """Assert that a result is the sum of parts, or a copy if there is one part.

    before: the tensor's values before the call. rows: the rank's messages in this case.
    """
    stack = torch.stack(parts)
    assert got.dtype == stack.dtype, f"{what}: got {got.dtype}, expected {stack.dtype}"
    assert got.shape == stack.shape[1:], f"{what}: got shape {tuple(got.shape)}, expected {tuple(stack.shape[1:])}"
    want, eps = stack.double().sum(0), torch.finfo(got.dtype).eps if got.dtype.is_floating_point else 0.0
    # n - 1 roundings, in any order. The error of a plain sum is no limit: with few 16-bit numbers it may be 0.
    allowed = (len(parts) - 1) * eps * stack.double().abs().sum(0)
    wrong = ~((got.double() - want).abs() <= allowed)  # NaN too
    if not wrong.any():
        return
    if before is not None and torch.equal(got.double().nan_to_num(7.5), before.double().nan_to_num(7.5)):
        cause = f"{cause}; nothing was written there, it is as it was before the call"
    note = f"; messages: {messages(rows)}" if rows else ""
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off: got {brief(got[wrong])}, expected "
        f"{brief(want[wrong])}, allowed ±{float(allowed.max()):.2g}{pattern(got.double(), want, allowed)}: "
        f"{explain_sum(got, parts) or cause}{note}{looks_like(got.double(), want, allowed)}"
    )


@harmless
def explain_sum(got, parts) -> str:
    """Explain a wrong sum: how often it contains the part of each rank, once for all elements or per span."""
    stack = torch.stack(parts).double().flatten(1)
    scale = stack.abs().sum(0)
    eps = torch.finfo(got.dtype).eps if got.dtype.is_floating_point else 0.0
    wrong = ((got.double().flatten() - stack.sum(0)).abs() > len(parts) * eps * scale).nonzero().flatten()[:20].tolist()
    fits = {i: {
        counts for counts in itertools.product(range(3), repeat=len(parts))
        if abs(float(got.flatten()[i]) - sum(n * float(x) for n, x in zip(counts, stack[:, i], strict=True)))
        <= 4 * eps * float(scale[i])
    } for i in wrong}  # fmt: skip
    common = set.intersection(*fits.values()) if fits else set()
    if len(common) == 1:
        return _describe(next(iter(common)))
    if common or any(len(found) != 1 for found in fits.values()):
        return ""
    spans = [(counts, [*indices]) for counts, indices in itertools.groupby(wrong, lambda i: next(iter(fits[i])))]
    return "; ".join(f"in elements {indices[0]} to {indices[-1]} {_describe(counts)}" for counts, indices in spans[:3])


def _describe(counts: Sequence[int]) -> str:
    words = {0: "is not in it", 2: "is in it twice"}
    return ", ".join(f"rank {rank}'s {words[n]}" for rank, n in enumerate(counts) if n != 1)


def brief(tensor) -> str:
    return f"{tensor.flatten()[:6].tolist()}{'…' if tensor.numel() > 6 else ''}"


def messages(rows) -> str:
    """Describe the messages in order; join equal neighbours."""
    texts = [f"{r['op']} {r['elements']} of {r['dtype']}, {r['bytes']} bytes" for r in rows]
    return "; ".join(
        f"{text}{f' (times {n})' if (n := len([*run])) > 1 else ''}" for text, run in itertools.groupby(texts)
    )


def sends(rows, what) -> list:
    """Return the sends among these rows; fail if a row is neither a send nor a receive."""
    other = sorted({r["op"] for r in rows} - {"send", "recv"})
    assert not other, (
        f"{what}: issued {', '.join(other)}; expected sends and receives alone: a group's methods are collectives too"
    )
    return [r for r in rows if r["op"] == "send"]


def check_memory(run, rng, op, elements, needs, forbidden, what) -> None:
    """Assert that a call with a right result never holds `what` in memory; the kernel measures the memory peak.

    elements: size of a tensor or part; the drawn size is up to 10 % larger. needs, forbidden: bytes, in units of it.
    """
    world, n, seed = 4, rng.integers(elements, elements * 11 // 10), rng.integers(1, 99)
    cases = [probes_collectives.large_case(op, n, seed, rank, world) for rank in range(world)]
    small = run.trace(probes_collectives.large, op, 64, seed, world=world)
    for rank, trace in enumerate(run.trace(probes_collectives.large, op, n, seed, world=world)):
        totals = [sum(parts) for parts in summands(op, cases, rank)]
        correct = trace.values == [block for total in totals for block in probes_collectives.blocks(total)]
        assert correct, f"rank {rank} of {world}: with {n} elements, the result is off"

        def report(rank: int = rank) -> dict:
            return run(probes_collectives.large, op, n, seed, True, world=world)[rank]

        never_holds(trace, small[rank], f"rank {rank} of {world}: {what}", forbidden * 4 * n, needs * 4 * n, report)


def summands(op, cases, rank) -> list[list[torch.Tensor]]:
    """Return, per result of a rank, the tensors that it sums; one tensor if the result is a copy."""
    if op == "all_to_all":
        return [[case["inputs"][rank]] for case in cases]
    tensors = [case["tensor"] for case in cases]
    if op == "ring_all_gather":
        return [[torch.cat(tensors)]]
    if op == "broadcast":
        return [[tensors[cases[0]["src"]]]]
    return [[t.chunk(len(cases))[rank] if op == "ring_reduce_scatter" else t for t in tensors]]


def check_one_neighbour(ranks, what, count) -> None:
    """Assert that each rank sent `count` messages, and that all ranks sent to the right, or all to the left."""
    world, directions = len(ranks), set()
    for rank, rows in enumerate(ranks):
        name = f"{what}, rank {rank} of {world}"
        sent = sends(rows, name)
        measured(f"messages that a rank of {world} sends", len(sent), count)
        assert len(sent) == count, f"{name}: sent {len(sent)} messages, expected {count}"
        right, left = (rank + 1) % world, (rank - 1) % world
        peers = sorted({r["peer"] for r in sent})
        assert peers in ([right], [left]), (
            f"{name}: sent to ranks {peers}, expected {right} alone, its right neighbour in the ring, or {left} alone, "
            "its left"
        )
        directions |= {peers == [right]} if right != left else set()
    assert len(directions) <= 1, f"{what}: some ranks sent to their right neighbour, others to their left"


def check_parts_sent(run, rng, op, world) -> None:
    """Assert that each rank sends W − 1 whole parts, all to one neighbour."""
    parts = [[rng.integers(2, 9)], [rng.integers(1, 4), 3]]
    dtypes = rng.shuffled([torch.float16, rng.choice([torch.float64, torch.int64])])
    ranks = run_cases(run, op, draw(rng, op, world, world, parts, dtypes))
    for i, shape in enumerate(parts):
        by_rank, what = [got[i]["rows"] for got in ranks], f"parts of shape {shape}, {dtypes[i]}"
        check_one_neighbour(by_rank, what, world - 1)
        size = torch.Size(shape).numel() * dtypes[i].itemsize
        wrong = {r["bytes"] for rows in by_rank for r in sends(rows, what)} - {size}
        assert not wrong, (
            f"{what}: rank 0 sent {messages(sends(by_rank[0], what))}; expected a part in each, as it is, {size} bytes"
        )
