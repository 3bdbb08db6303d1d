"""Embedding and cross-entropy of which each rank has a share of the vocabulary.

What must be true: rows and losses are those of the whole, for vocabularies that divide and for padded ones; a token
costs three numbers, not a row of logits, and backward costs nothing. How it would be faked or got wrong: gather the
logits (the ledger and the largest storage tell); forget the offset, or add other ranks' rows instead of zeros; a
maximum of this rank's own columns, which no other rank subtracts, or none, which overflows; padding that takes
probability; a loss averaged over ranks, whose gradient is 1/T too small; each rank holding the whole table.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lab.judge import close
from lab.pytest_plugin import exercise

from . import probes_tensor as probes
from . import suspects_tensor as suspects
from .tensor_oracles import draw_groups, keeps_its_share, members

VOCAB = "mesh.vocab_parallel"
NEEDS = ["mesh.conjugates"]
CASES = [(1, 0, False), (2, 1, False), (3, 0, False), (4, 3, False), (2, 1, True)]  # ranks, rows of padding, in groups


def draw(rng, size: int, missing: int, grouped: bool) -> tuple:
    """(world, groups, rows of each rank, vocabulary, tokens that include both ends of every rank's rows)"""
    world, groups = draw_groups(rng, size) if grouped else (size, [])
    rows = 2 if missing == 3 else rng.integers(2, 4)  # five tokens over four ranks: the last has padding alone
    vocabulary = rows * size - missing
    ends = [t for r in range(size) for t in (r * rows, r * rows + rows - 1) if t < vocabulary]
    more = rng.tokens(len(ends) % 2 + 2 * rng.integers(2, 3), vocabulary=vocabulary).tolist()
    return world, groups, rows, vocabulary, torch.tensor(rng.shuffled([*ends, *more])).view(2, -1)


@exercise(VOCAB, kind="numerics")
@pytest.mark.parametrize(("size", "missing", "grouped"), CASES)
def test_each_token_gets_its_row_and_each_row_its_gradient(run, rng, size, missing, grouped):
    world, groups, rows, vocabulary, tokens = draw(rng, size, missing, grouped)
    weight = rng.normal(vocabulary, 3)
    dy = rng.normal(*tokens.shape, 3)
    gradient = torch.zeros(rows * size, 3).double().index_add_(0, tokens.flatten(), dy.double().flatten(0, 1))
    plain = torch.zeros(rows * size, 3).index_add_(0, tokens.flatten(), dy.flatten(0, 1))
    told = run(probes.embedding, weight, tokens, dy, groups, world=world, replace=NEEDS)
    for group in members(world, groups):
        for place, rank in enumerate(group):
            what = f"rank {rank} of {group}, vocabulary {vocabulary}"
            want = weight[tokens]
            close(
                told[rank]["y"], want.double(), want, f"{what}, embedded tokens", factor=2, dims="batch, token, width",
                cause="a row is found on one rank, at the token less the rank's first; the others add zeros",
                suspects=lambda place=place: suspects.of_rows(weight, tokens, rows, size, place),
            )  # fmt: skip
            mine = slice(place * rows, place * rows + rows)
            close(
                told[rank]["gradient"], gradient[mine], plain[mine], f"{what}, gradient of its rows", factor=4,
                dims="row, column", cause="tokens of other ranks, and padding, give no gradient here",
            )  # fmt: skip


def whole_loss(logits: torch.Tensor, targets: torch.Tensor, scale: float, dtype: str) -> dict:
    """The mean cross entropy of whole logits, and the gradient of scale · loss."""
    x = logits.to(getattr(torch, dtype)).requires_grad_()
    loss = F.cross_entropy(x.flatten(0, 1), targets.flatten())
    (loss * scale).backward()
    return {"loss": loss.detach(), "dlogits": x.grad}


@exercise(VOCAB, kind="numerics")
@pytest.mark.parametrize(("size", "missing", "grouped"), CASES)
@pytest.mark.parametrize("height", [1.0, 150.0])
def test_the_loss_is_that_of_the_whole_logits(run, rng, expect, size, missing, grouped, height):
    """height: of logits; e^150 is no float32. Padding columns are large: who counts them is far off."""
    world, groups, _, vocabulary, targets = draw(rng, size, missing, grouped)
    logits = rng.normal(*targets.shape, vocabulary) * height
    scale = rng.uniform(0.5, 2.0)
    want, plain = (expect(whole_loss, logits, targets, scale, dtype) for dtype in ("float64", "float32"))
    padding = torch.full((*targets.shape, missing), 2 * height)
    parts = torch.cat([logits, padding], -1).chunk(size, -1)
    place = {rank: group.index(rank) for group in members(world, groups) for rank in group}
    given = [parts[place[r]] for r in range(world)]
    told = run(probes.cross_entropy, given, targets, vocabulary, scale, groups, world=world, replace=NEEDS)
    for rank, got in enumerate(told):
        what = f"rank {rank}, place {place[rank]} of {size}, logits of about {height:g}"
        assert got["loss"].shape == (), f"{what}: a loss of shape {tuple(got['loss'].shape)}, expected ()"
        assert got["loss"].dtype == torch.float32, f"{what}: the loss is {got['loss'].dtype}, expected float32"
        close(
            got["loss"], want["loss"], plain["loss"], f"{what}, loss", factor=10,
            cause="maximum, sum and target's logit are those of all columns that count",
            suspects=lambda at=place[rank]: suspects.of_loss("loss", parts, vocabulary, targets, scale, at),
        )  # fmt: skip
        full, plainly = (F.pad(t["dlogits"], (0, missing)) for t in (want, plain))
        close(
            got["dlogits"], full.chunk(size, -1)[place[rank]], plainly.chunk(size, -1)[place[rank]],
            f"{what}, gradient of its logits", factor=10, dims="batch, token, column",
            cause="softmax − one-hot over the tokens' number; padding has none",
            suspects=lambda at=place[rank]: suspects.of_loss("dlogits", parts, vocabulary, targets, scale, at),
        )  # fmt: skip


@exercise(VOCAB, kind="numerics")
def test_float16_logits_are_summed_in_float32(run, rng, expect):
    """Small logits of a large vocabulary: the sum of exponentials is beyond what float16 adds 1 to."""
    vocabulary, size = 2 * 4100, 2
    logits = (rng.normal(1, 2, vocabulary) * 0.01).half()
    targets = rng.tokens(1, 2, vocabulary=vocabulary)
    want, plain = (expect(whole_loss, logits, targets, 1.0, dtype) for dtype in ("float64", "float32"))
    given = list(logits.chunk(size, -1))
    told = run(probes.cross_entropy, given, targets, vocabulary, 1.0, [], world=size, replace=NEEDS)
    for rank, got in enumerate(told):
        close(
            got["loss"].float(), want["loss"], plain["loss"], f"rank {rank}, loss of float16 logits", factor=10,
            cause="softmax in float32",
        )  # fmt: skip


@exercise(VOCAB, kind="property")
def test_each_rank_keeps_its_share_of_the_rows(run, rng):
    world = rng.integers(3, 4)
    rows, columns = rng.integers(30, 40), rng.integers(7, 9)
    sizes = {"rows": rows * world - rng.integers(0, world - 1), "columns": columns}
    keeps_its_share(run, "embedding", sizes, [{"weight": [rows, columns]}] * world, NEEDS)


@exercise(VOCAB, kind="property")
def test_an_embedding_is_one_all_reduce_forward(run, rng):
    weight, tokens = rng.normal(6, 3), rng.tokens(2, 4, vocabulary=6)
    for rank, got in enumerate(run(probes.embedding, weight, tokens, rng.normal(2, 4, 3), [], world=2, replace=NEEDS)):
        told = [[row["op"], row["elements"], row["phase"]] for row in got["rows"]]
        assert told == [["all_reduce", 24, ""]], (
            f"rank {rank}: sent [what, elements, when] {told}, expected one all_reduce of 24 elements forward"
        )


@exercise(VOCAB, kind="property")
def test_three_numbers_a_token_are_sent_and_no_logits_gathered(run, rng):
    world, batch, context = rng.integers(2, 4), 2, rng.integers(3, 5)
    rows = 40
    targets = rng.tokens(batch, context, vocabulary=rows * world)
    logits = [rng.normal(batch, context, rows) for _ in range(world)]
    args = (logits, targets, rows * world, 1.0, [])
    for rank, got in enumerate(run(probes.cross_entropy, *args, world=world, replace=NEEDS)):
        ops, phases = {row["op"] for row in got["rows"]}, {row["phase"] for row in got["rows"]}
        assert ops == {"all_reduce"}, f"rank {rank}: sent by {', '.join(sorted(ops)) or 'nothing'}, expected all_reduce"
        assert phases == {"forward"}, f"rank {rank}: sent in {sorted(phases)}; backward of its columns needs nobody"
        elements = sum(row["elements"] for row in got["rows"])
        assert elements <= 3 * batch * context, (
            f"rank {rank}: {elements} elements reduced for {batch * context} tokens, expected three numbers a token: "
            "maximum, sum of exponentials, target's logit"
        )
        own = logits[0].numel()
        assert got["largest_elements"] <= 1.25 * own, (
            f"rank {rank} of {world}: a storage of {got['largest_elements']} elements; its logits have {own}: the "
            "whole ones must not exist"
        )
