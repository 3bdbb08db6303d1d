"""Suspects, what an exercise comes to where one thing is wrong: each can be computed, and names what it is for."""

from __future__ import annotations

import math

import pytest
import torch

from lab.judge import close, in_time
from tests.flash_attention import oracles, suspects, suspects_steps
from tests.mesh.suspects_experts import because
from tests.zero.suspects import of_step
from tests.zero.suspects_training import explain


def told(got, want, of) -> str:
    with pytest.raises(AssertionError) as error:
        close(got, want, want.float(), "x", cause="nobody knows", suspects=lambda: of)
    return str(error.value).rpartition(": ")[2]


def attended(is_causal: bool, group: int = 1, queries: int = 37, keys: int = 50) -> tuple:
    torch.manual_seed(0)
    q, do = (torch.randn(2, 2 * group, queries, 16) for _ in range(2))
    k, v = (torch.randn(2, 2, keys, 16) for _ in range(2))
    out = oracles.attention(q, k, v, is_causal, "float64")
    given = {"q": q, "k": k, "v": v, "do": do, "lse": out["lse"], "delta": (do * out["o"]).sum(-1)}
    return q, k, v, given


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 50), (150, 20)])
def test_every_suspect_of_attention_can_be_computed(is_causal, group, queries, keys):
    q, k, v, given = attended(is_causal, group, queries, keys)
    for name, like in (("o", q), ("lse", q[..., 0])):
        for cause, tensor in suspects.of_forward(name, q, k, v, is_causal):
            assert tensor.shape == like.shape, cause
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        for cause, tensor in suspects.of_backward(name, given, is_causal):
            assert tensor.shape == like.shape, cause
    three = (q[:, 0], k[:, 0], v[:, 0])
    assert len([*suspects.of_forward("o", *three, is_causal)]) > 10


def test_every_suspect_of_the_smaller_exercises_can_be_computed():
    x, weight, dy = torch.randn(21, 70), torch.randn(70), torch.randn(21)
    found = [*suspects_steps.of_weighted_sum(x, weight)]
    for name in ("dx", "dweight"):
        found += suspects_steps.of_weighted_sum_gradients(name, x, weight, dy)
    for name in ("maximum", "normaliser", "lse"):
        found += suspects_steps.of_statistics(name, x, [30, 1, 39])
    for chunk in (None, 1, 8, 99):
        case = {
            "x": x,
            "weight": torch.randn(11, 70),
            "targets": torch.randint(11, (21,)),
            "chunk": chunk,
            "dloss": 3.0,
        }
        for name in ("loss", "dx", "dweight"):
            found += suspects_steps.of_fused_loss(name, case)
    assert len(found) > 100
    assert all(cause for cause, _ in found)


def test_what_is_wrong_with_attention_is_named():
    q, k, v, given = attended(True, group=2, queries=70, keys=70)
    want = oracles.attention(q, k, v, True, "float64")
    heads = k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    s = (q.double() @ heads[0].mT) / 4
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)

    def o(s, hidden=hidden):
        return s.masked_fill(hidden, -math.inf).softmax(-1) @ heads[1]

    def of(name="o"):
        return suspects.of_forward(name, q, k, v, True)

    assert told(o(s * 4), want["o"], of()) == "are scores multiplied by 1 / √dim?"
    assert told(o(s, hidden & False), want["o"], of()) == "is the mask applied?"
    assert told(o(s, torch.ones_like(hidden).triu()), want["o"], of()) == "query i sees key i, too"
    assert told(want["lse"] / math.log(2), want["lse"], of("lse")) == "the logarithm is the natural one"
    assert told(want["o"] + torch.randn_like(want["o"]), want["o"], of()) == "nobody knows"
    right = oracles.recomputed(given, True, "float64")
    assert told(right["dv"], right["dk"], suspects.of_backward("dk", given, True)) == (
        "are dk and dv in each other's place?"
    )


def test_a_suspect_that_cannot_be_computed_spoils_no_message():
    def broken():
        yield "this one is not met", torch.zeros(3, dtype=torch.float64)
        raise AttributeError("a bug of the kit's")

    assert told(torch.ones(3), torch.full((3,), 2.0, dtype=torch.float64), broken()) == "nobody knows"


def test_nor_does_what_explains_more_than_a_tensor():
    def broken():
        yield "this one is not met", 1
        raise AttributeError("a bug of the kit's")

    assert because(2, broken(), otherwise="nobody knows") == "nobody knows"
    assert of_step({}, {"values": [[None]]}, {0: {"values": [[None]]}}, rank=0, step=0) == ""
    assert explain("fsdp", {}, [], [], [], [], small=0, rough=False) == ""


def test_who_waits_for_a_message_waits_for_some_suspects_only(monkeypatch):
    monkeypatch.setattr("lab.judge.PATIENCE_S", 0.0)
    assert [*in_time("abc")] == ["a"]
