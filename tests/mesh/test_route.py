"""The experts that each token chooses, and the loss that balances them over a batch.

Must hold: a token chooses the k most probable experts, and ties go to the lower number. Gates have their gradient. The
balancing loss and its gradient are those of the whole batch, for any division over ranks.
Typical fakes: torch.topk, whose order of ties is arbitrary (logits here have few values); normalised gates, which give
no gradient if k is 1; the mean of the ranks' losses (ranks differ in size and in choices); a gradient that is 1/W of
the right one after averaging; counts of choices divided by tokens instead of tokens · k.
"""

import pytest
import torch

from lab.harness import layouts
from lab.harness.judge import close, measured
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_experts as probes
from .carried import BOTH
from .experts import each_case, in_group

ROUTE = "mesh.route"


def draw(rng, k: int, n: int, tokens: int, dtype=torch.float32, skew: float = 1.0, averaged_over=None) -> dict:
    logits = (rng.normal(tokens, n) + skew * rng.normal(n)).to(dtype)
    operands, layout = layouts.draw(rng, logits=logits, weights=rng.normal(tokens, k))
    return {**operands, "k": k, "averaged_over": averaged_over, "layouts": layout}


def oracle(cases: list, dtype=torch.float64) -> list:
    """Route the whole batch in one process; one dict per rank, with the gradient of balance times the ranks."""
    logits, weights = (torch.cat([c[name] for c in cases]) for name in ("logits", "weights"))
    x, k, n = logits.to(dtype).requires_grad_(), cases[0]["k"], logits.shape[1]
    p, tokens = x.softmax(-1), max(1, len(x))
    experts = logits.sort(descending=True, stable=True).indices[:, :k]
    gates = p.gather(1, experts)
    balance = n * (experts.flatten().bincount(minlength=n) / (tokens * k) * p.sum(0) / tokens).sum()
    (by_gates,) = torch.autograd.grad((gates * weights.to(dtype)).sum(), x, retain_graph=True)
    (by_balance,) = torch.autograd.grad(balance, x)
    by_balance *= cases[0]["averaged_over"] or len(cases)
    batch = {"experts": experts, "gates": gates.detach(), "by_gates": by_gates, "by_balance": by_balance}
    parts = {name: t.split([len(c["logits"]) for c in cases]) for name, t in batch.items()}
    return [{name: t[r] for name, t in parts.items()} | {"balance": balance.detach()} for r in range(len(cases))]


def check(got: dict, cases: list, rank: int, what: str) -> None:
    """Judge one rank's answers. cases: those of all ranks."""
    want, plain = (oracle(cases, dtype)[rank] for dtype in (torch.float64, torch.float32))
    logits = cases[rank]["logits"]
    what += f", logits {tuple(logits.shape)}, k={cases[0]['k']}"
    assert got["gates"].dtype == torch.promote_types(logits.dtype, torch.float32), (
        f"{what}: gates are {got['gates'].dtype}, expected float32, float64 for float64 logits"
    )
    assert torch.equal(got["experts"], want["experts"]), (
        f"{what}: experts {got['experts'].tolist()}, expected {want['experts'].tolist()}: the k largest logits, "
        "largest first, the lower number where they are equal"
    )
    for name, cause in CAUSES.items():
        value, wanted, yardstick = (t[name].reshape(-1) for t in (got, want, plain))
        # Gradients of a 16-bit tensor are rounded to it, once.
        close(value, wanted, yardstick.to(value.dtype), f"{what}, {name}", factor=8, cause=cause)


CAUSES = {
    "gates": "the probabilities of the chosen, over all experts, not normalised again",
    "balance": "n · Σ f · P over all ranks' tokens: sum choices, probabilities and tokens over the group first",
    "by_gates": "a gate is a probability, and has its gradient",
    "by_balance": "the gradient of the whole batch's loss, times what gradients will be divided by; f has none",
}


def judge(run, cases: list, members: list = (), no_group: bool = False) -> list:
    """Judge choices, gates and loss; return all values and messages, [case][rank]. cases: [rank][case]."""
    answers = in_group(run, probes.route, cases, members, no_group)
    for rank_cases, results in zip(zip(*cases, strict=True), answers, strict=True):
        for rank, got in enumerate(results):
            check(got, rank_cases, rank, f"rank {rank} of {len(results)}")
    return answers


@exercise(ROUTE, kind="numerics")
def test_the_most_probable_experts_and_their_gates(run, rng):
    sizes = [(1, 1), (1, 4), (2, 4), (2, rng.integers(5, 9)), (2, 2)]
    judge(run, [[draw(rng, k, n, rng.integers(2, 9)) for k, n in sizes]], no_group=True)


@exercise(ROUTE, kind="numerics")
def test_probabilities_are_of_32_bits_at_least(run, rng):
    dtypes = (torch.float16, torch.bfloat16, torch.float64)
    judge(run, [[draw(rng, 2, rng.integers(3, 8), 6, dtype, skew=3.0) for dtype in dtypes]], no_group=True)


@exercise(ROUTE, kind="numerics")
def test_ties_go_to_the_lower_number(run, rng):
    cases = []
    for n in (3, 17, 40):
        case = draw(rng, 2, n, 12)
        case["logits"] = case["logits"].round().clamp(-1, 1)
        cases.append(case)
        cases.append(draw(rng, 2, n, 12, skew=300.0))  # most probabilities are 0 in float32, but logits do not tie
    judge(run, [cases], no_group=True)


@exercise(ROUTE, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_balance_is_that_of_the_whole_batch(run, rng, world):
    n = rng.integers(3, 6)
    uneven = [[draw(rng, k, n, rng.integers(1, 6) + 2 * r, skew=2.0) for k in (1, 2)] for r in range(world)]
    uneven[-1].append(draw(rng, 2, n, 0))  # no tokens on the last rank; with one rank, none at all
    for cases in uneven[:-1]:
        cases.append(draw(rng, 2, n, 4))
    judge(run, uneven)


@exercise(ROUTE, kind="numerics")
def test_balance_gradients_when_averaged_over_half_the_ranks(run, rng):
    """As under sequence parallelism: statistics cover four ranks, but gradients are divided by two."""
    cases = [[draw(rng, 3, 5, 3, skew=2.0, averaged_over=2)] for _ in range(4)]
    judge(run, cases)


@exercise(ROUTE, kind="numerics")
def test_statistics_are_those_of_the_group(run, rng):
    members = sorted(rng.shuffled(range(1, 4))[:2])
    judge(run, [[draw(rng, 2, 5, 4, skew=2.0)] for _ in members], members)


@exercise(ROUTE, kind="numerics")
def test_a_k_that_no_token_can_have_is_refused(run, rng):
    n = rng.integers(2, 5)
    errors = run(probes.refused, "route", [[torch.zeros(3, n), k] for k in (0, -1, n + 1)])
    assert errors == ["ValueError"] * 3, f"k of 0, -1 and {n + 1} with {n} experts: expected ValueError, got {errors}"


@exercise(ROUTE, kind="property")
def test_statistics_are_all_that_is_sent(run, rng):
    """The message's size does not depend on the number of tokens. Backward sends nothing."""
    n, tokens = rng.integers(3, 8), rng.integers(40, 60)
    counts = [tokens, 4 * tokens]
    cases = [[draw(rng, 2, n, count) for count in counts] for _ in range(2)]
    for count, _, rank, _, got in each_case(counts, cases, judge(run, cases)):
        what = f"rank {rank}, {count} tokens, {n} experts"
        forward, backward = (got["sent"][part] for part in BOTH)
        sends(forward, [["all_reduce"]], f"{what}, forward", "join what is summed in one tensor", ["op"])
        sends(backward, [], f"{what}, backward", "it multiplies this rank's part")
        elements = forward[0]["elements"]
        measured(f"numbers in an all_reduce, {n} experts", elements, 2 * n + 1, at_most=True)
        assert elements <= 2 * n + 1, (
            f"{what}: all_reduce of {elements} numbers, expected at most 2n + 1 = {2 * n + 1}: choices and "
            "probabilities by expert, and the number of tokens"
        )


@exercise(ROUTE, kind="property")
def test_without_a_group_nothing_is_sent(run, rng):
    cases = [[draw(rng, 2, 4, 3)] for _ in range(2)]
    (results,) = in_group(run, probes.route, cases, no_group=True, world=2)
    for rank, got in enumerate(results):
        check(got, cases[rank], 0, f"rank {rank}, group=None")
        for part in BOTH:
            sends(got["sent"][part], [], f"rank {rank}, {part}", "group=None means no communication")
