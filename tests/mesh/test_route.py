"""Which experts a token goes to, and how evenly a batch is spread.

What must be true: the k most probable, ties to the lower number, gates with their gradient; the balancing loss and its
gradient are those of the whole batch, however it is split over ranks. How it would be faked or got wrong: torch.topk,
which picks ties as it likes (logits here have few values); gates normalised, so that one of one expert teaches nothing;
the mean of the ranks' losses for the loss of all (shares differ in size and in what they choose); a gradient that is
1/W of it after averaging; shares of choices over tokens, not over tokens · k.
"""

from __future__ import annotations

import pytest
import torch

from lab.judge import Suspects, close, measured
from lab.pytest_plugin import exercise

from . import probes_experts as probes

ROUTE = "mesh.route"


def draw(rng, k: int, n: int, tokens: int, dtype=torch.float32, skew: float = 1.0, averaged_over=None) -> dict:
    logits = (rng.normal(tokens, n) + skew * rng.normal(n)).to(dtype)
    return {"logits": logits, "k": k, "weights": rng.normal(tokens, k), "averaged_over": averaged_over}


def best(logits: torch.Tensor, k: int) -> torch.Tensor:
    rows = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in logits.tolist()]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(logits), k)


def oracle(cases: list, dtype=torch.float64) -> list:
    """The whole batch in one process; one dict a rank, the gradient of balance as the mean over ranks needs it."""
    leaves = [c["logits"].to(dtype).requires_grad_() for c in cases]
    k, n = cases[0]["k"], leaves[0].shape[1]
    p = [torch.softmax(x, dim=-1) for x in leaves]
    chosen = [best(c["logits"], k) for c in cases]
    tokens = max(1, sum(map(len, leaves)))
    f = [sum(int((e == i).sum()) for e in chosen) / (tokens * k) for i in range(n)]
    balance = n * sum(f[i] * sum(x[:, i].sum() for x in p) / tokens for i in range(n))
    answers = []
    for c, x, probabilities, e in zip(cases, leaves, p, chosen, strict=True):
        gates = probabilities.gather(1, e)
        by_gates = torch.autograd.grad((gates * c["weights"].to(dtype)).sum(), x, retain_graph=True)[0]
        by_balance = torch.autograd.grad(balance, x, retain_graph=True)[0] * (c["averaged_over"] or len(cases))
        answers.append({"experts": e, "gates": gates.detach(), "balance": balance.detach(), "by_gates": by_gates,
                        "by_balance": by_balance})  # fmt: skip
    return answers


def instead(name: str, together: list, place: int) -> Suspects:
    """What one of the answers of a rank may be. together: the cases of all ranks."""
    case, world = together[place], len(together)
    true = oracle(together)[place]
    if name == "gates":
        yield (
            "gates are normalised again: with k = 1 they are 1, and teach nothing",
            true["gates"] / true["gates"].sum(1, keepdim=True),
        )
        chosen = case["logits"].double().gather(1, true["experts"])
        yield "the softmax is over the chosen alone: over all experts", chosen.softmax(1)
        yield "they are logits, not probabilities", chosen
        for dtype in (torch.float16, torch.bfloat16):
            if case["logits"].dtype == dtype:
                rounded = torch.softmax(case["logits"], dim=-1).gather(1, true["experts"])
                yield f"the softmax is in {str(dtype)[6:]}: in float32 at least", rounded
    if name == "by_gates":
        yield "gates have no gradient: are they detached, together with the choice?", 0 * true[name]
    if name in ("balance", "by_balance") and world > 1:
        alone = [oracle([c]) for c in together]
        cause = "it is of this rank's tokens alone: sum choices, probabilities and tokens over the group first"
        yield cause, alone[place][0][name]
        if name == "by_balance":
            yield cause, alone[place][0][name] * world
            divisor = case["averaged_over"] or world
            if divisor != world:
                cause = f"it is times the group's size, {world}: times averaged_over, {divisor}"
                yield cause, true[name] / divisor * world
            yield (
                "divided by the ranks, once too often: times what gradients will be divided by",
                true[name] / divisor,
            )
        else:
            cause = "it is the mean of the ranks' own losses: a mean of products is not the product of means"
            yield cause, torch.stack([own[0][name] for own in alone]).mean()
            yield "it is the sum of the ranks' own losses", torch.stack([own[0][name] for own in alone]).sum()
            weighed = _mean_of_means(together)
            yield "ranks that have other numbers of tokens weigh as much: sum first, then divide by all tokens", weighed
    if name == "balance":  # once it is right, so is f
        yield "f is a share of tokens: of choices, tokens · k, so that it sums to 1", true[name] * case["k"]
    if name in ("balance", "by_balance"):
        yield "it is not multiplied by the number of experts", true[name] / case["logits"].shape[1]


def _mean_of_means(together: list) -> torch.Tensor:
    n, k = together[0]["logits"].shape[1], together[0]["k"]
    f, p = [], []
    for c in together:
        tokens = max(1, len(c["logits"]))
        e = best(c["logits"], k)
        f.append(torch.tensor([int((e == i).sum()) / (tokens * k) for i in range(n)], dtype=torch.float64))
        p.append(torch.softmax(c["logits"].double(), -1).sum(0) / tokens)
    return n * (torch.stack(f).mean(0) * torch.stack(p).mean(0)).sum()


def check(got: dict, want: dict, plain: dict, what: str, together: list, place: int) -> None:
    """together: the cases of all ranks; place: this one's."""
    empty = not any(len(c["logits"]) for c in together)
    assert torch.equal(got["experts"], want["experts"]), (
        f"{what}: experts {got['experts'].tolist()}, expected {want['experts'].tolist()}: the k largest logits, "
        "largest first, the lower number where they are equal"
    )
    causes = {
        "gates": "the probabilities of the chosen, over all experts, not normalised again",
        "balance": "n · Σ f · P over all ranks' tokens: sum choices, probabilities and tokens over the group first",
        "by_gates": "a gate is a probability, and has its gradient",
        "by_balance": "the gradient of the whole batch's loss, times what gradients will be divided by; f has none",
    }
    if empty:
        causes["balance"] = "no rank has a token, and shares and means would divide by 0 tokens: divide by 1 at least"
    for name, cause in causes.items():
        value, wanted, plainly = (t[name].reshape(-1) for t in (got, want, plain))
        # Gradients of a 16-bit tensor are rounded to it, once.
        close(
            value, wanted, plainly.to(value.dtype), f"{what}, {name}", factor=8, cause=cause,
            suspects=lambda name=name: ((why, t.reshape(-1)) for why, t in instead(name, together, place)),
        )  # fmt: skip


def judge(run, cases: list, groups=None, members=None, world=None) -> list:
    """cases: [rank of the group][case]."""
    members = members or list(range(len(cases)))
    asked = [cases[members.index(r)] if r in members else [] for r in range(world or len(cases))]
    ranks = run(probes.route, asked, groups, **({} if groups is None else {"world": len(asked)}))
    ranks = [ranks] if groups is None else ranks
    for i in range(len(cases[0])):
        together = [c[i] for c in cases]
        want, plain = oracle(together), oracle(together, torch.float32)
        for place, r in enumerate(members):
            what = (
                f"rank {place} of {len(members)}, logits {tuple(together[place]['logits'].shape)}, k={together[0]['k']}"
            )
            assert ranks[r][i]["gates"].dtype == torch.promote_types(together[place]["logits"].dtype, torch.float32), (
                f"{what}: gates are {ranks[r][i]['gates'].dtype}, expected float32, float64 for float64 logits"
            )
            check(ranks[r][i], want[place], plain[place], what, together, place)
    return ranks


@exercise(ROUTE, kind="numerics")
def test_the_most_probable_experts_and_their_gates(run, rng):
    sizes = [(1, 1), (1, 4), (2, 4), (2, rng.integers(5, 9)), (2, 2)]
    judge(run, [[draw(rng, k, n, rng.integers(2, 9)) for k, n in sizes]])


@exercise(ROUTE, kind="numerics")
def test_probabilities_are_of_32_bits_at_least(run, rng):
    dtypes = (torch.float16, torch.bfloat16, torch.float64)
    judge(run, [[draw(rng, 2, rng.integers(3, 8), 6, dtype, skew=3.0) for dtype in dtypes]])


@exercise(ROUTE, kind="numerics")
def test_ties_go_to_the_lower_number(run, rng):
    cases = []
    for n in (3, 17, 40):
        case = draw(rng, 2, n, 12)
        case["logits"] = case["logits"].round().clamp(-1, 1)
        cases.append(case)
    judge(run, [cases])


@exercise(ROUTE, kind="numerics")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_balance_is_that_of_the_whole_batch(run, rng, world):
    n = rng.integers(3, 6)
    uneven = [[draw(rng, k, n, rng.integers(1, 6) + 2 * r, skew=2.0) for k in (1, 2)] for r in range(world)]
    uneven[-1].append(draw(rng, 2, n, 0))  # nothing here, and with one rank nothing at all
    for cases in uneven[:-1]:
        cases.append(draw(rng, 2, n, 4))
    judge(run, uneven, [])


@exercise(ROUTE, kind="numerics")
def test_ranks_that_are_summed_and_not_averaged(run, rng):
    """As with sequence parallelism: statistics over four ranks, and two of them the divisor; no two factors alike."""
    cases = [[draw(rng, 3, 5, 3, skew=2.0, averaged_over=2)] for _ in range(4)]
    judge(run, cases, [])


@exercise(ROUTE, kind="numerics")
def test_statistics_are_those_of_the_group(run, rng):
    members = sorted(rng.shuffled(range(1, 4))[:2])
    judge(run, [[draw(rng, 2, 5, 4, skew=2.0)] for _ in members], [members], members, 4)


@exercise(ROUTE, kind="numerics")
def test_a_k_that_no_token_can_have_is_refused(run, rng):
    n = rng.integers(2, 5)
    told = run(probes.route_refused, n, [0, -1, n + 1])
    assert told == ["ValueError"] * 3, f"k of 0, -1 and {n + 1} with {n} experts: expected ValueError, got {told}"


@exercise(ROUTE, kind="property")
def test_statistics_are_all_that_is_sent(run, rng):
    """However many tokens there are. A backward that sums over ranks again is as right, and may."""
    n, tokens = rng.integers(3, 8), rng.integers(40, 60)
    cases = [[draw(rng, 2, n, t) for t in (tokens, 4 * tokens)] for _ in range(2)]
    for rank, told in enumerate(run(probes.route, cases, [], world=2)):
        for case, got in zip(cases[rank], told, strict=True):
            what = f"rank {rank}, {len(case['logits'])} tokens, {n} experts"
            sent = [(r["op"], r["elements"]) for r in got["forward"]]
            assert len(sent) == 1, f"{what}: sent {sent}, expected one all_reduce: join what is summed in one tensor"
            for op, elements in [(r["op"], r["elements"]) for r in got["forward"] + got["backward"]]:
                assert op == "all_reduce", f"{what}: {op} of {elements}, expected an all_reduce"
                measured(f"numbers in an {op}, {n} experts", elements, 2 * n + 1, at_most=True)
                assert elements <= 2 * n + 1, (
                    f"{what}: {op} of {elements} numbers, expected at most 2n + 1 = {2 * n + 1}: choices and "
                    "probabilities by expert, and the number of tokens"
                )


@exercise(ROUTE, kind="property")
def test_without_a_group_nothing_is_sent(run, rng):
    cases = [[draw(rng, 2, 4, 3)] for _ in range(2)]
    for rank, (got,) in enumerate(run(probes.route, cases, None, world=2)):
        sent = [r["op"] for r in got["forward"] + got["backward"]]
        assert not sent, f"rank {rank}: group=None means no communication here, and {sent} was issued"
