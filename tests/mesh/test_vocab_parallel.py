"""Embedding and cross-entropy with the vocabulary sharded over ranks.

Must hold: rows and losses are those of the whole vocabulary, with and without padding. Forward of the loss sends three
numbers per token, not a row of logits; backward sends nothing.
Typical fakes: gathered logits (caught by messages and memory peak); a forgotten offset, or other ranks' rows added
instead of zeros; the maximum of this rank's own columns, which no other rank subtracts; no maximum, which overflows;
padding that gets probability; a loss averaged over ranks, whose gradient is 1/T of the right one; the whole table kept.
"""

import pytest
import torch
import torch.nn.functional as F

from lab.harness import layouts
from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.harness.trace import sends

from . import probes_tensor as probes
from .carried import BOTH, check_no_growth, check_sends, traced
from .tensor_oracles import check_layer, check_share_kept, draw_groups, draw_state, memberships

VOCAB = "mesh.vocab_parallel"
CASES = [(1, 0, False), (2, 1, False), (3, 0, False), (4, 3, False), (2, 1, True)]  # ranks, rows of padding, in groups


def draw(rng, size: int, missing: int) -> tuple:
    """Draw (vocabulary, tokens that include both ends of every rank's rows)."""
    rows = 2 if missing == 3 else rng.integers(2, 4)  # five tokens over four ranks: the last has padding alone
    vocabulary = rows * size - missing
    edges = [t for r in range(size) for t in (r * rows, r * rows + rows - 1) if t < vocabulary]
    extra = rng.tokens(len(edges) % 2 + 2 * rng.integers(2, 3), vocabulary=vocabulary).tolist()
    return vocabulary, torch.tensor(rng.shuffled([*edges, *extra])).view(2, -1)


def check_embedding(run, rng, expect, size: int, missing: int, grouped: bool) -> tuple:
    """Judge rows and their gradients; return a tensor of the result's shape, and each rank's values and messages."""
    vocabulary, tokens = draw(rng, size, missing)
    sizes, dy = {"rows": vocabulary, "columns": 3}, rng.normal(*tokens.shape, 3)
    drawn = sizes, draw_state(rng, "embedding", sizes), tokens, dy
    ranks = check_layer(run, rng, expect, "embedding", drawn, size, grouped)
    filled = sum(int(got["parameters"]["weight"].any(1).sum()) for got in ranks)
    assert filled == vocabulary * (1 + grouped), (
        f"{filled} rows of all ranks are not zeros, and the vocabulary has {vocabulary}: rows beyond it are zeros"
    )
    return dy, ranks


@exercise(VOCAB, kind="numerics")
@pytest.mark.parametrize(("size", "missing", "grouped"), CASES)
def test_each_token_gets_its_row_and_each_row_its_gradient(run, rng, expect, size, missing, grouped):
    check_embedding(run, rng, expect, size, missing, grouped)


def full_loss(logits: torch.Tensor, targets: torch.Tensor, scale: float, dtype: str) -> dict:
    """Return the mean cross entropy of whole logits, and the gradient of scale · loss."""
    x = logits.to(getattr(torch, dtype)).requires_grad_()
    loss = F.cross_entropy(x.flatten(0, 1), targets.flatten())
    (loss * scale).backward()
    return {"loss": loss.detach(), "dlogits": x.grad}


def check_loss(run, rng, expect, logits: torch.Tensor, targets: torch.Tensor, size: int, missing: int = 0,
               grouped: bool = False) -> list:  # fmt: skip
    """Judge the loss of whole logits and its gradient; return each rank's values and messages."""
    (world, groups), vocabulary = draw_groups(rng, size, grouped), logits.shape[-1]
    scale, height = rng.uniform(0.5, 2.0), float(logits.abs().max())
    want, plain = (expect(full_loss, logits, targets, scale, dtype) for dtype in ("float64", "float32"))
    parts = F.pad(logits, (0, missing), value=height).chunk(size, -1)  # counted padding would change the loss
    index = {rank: index for rank, index, _ in memberships(world, groups)}
    inputs = [parts[index[r]] for r in range(world)]
    layout = layouts.draw(rng, logits=inputs[0], targets=targets)[1]
    ranks = traced(run, probes.cross_entropy, inputs, targets, vocabulary, scale, groups, layout, world=world)
    for rank, got in enumerate(ranks):
        what = f"rank {rank}, place {index[rank]} of {size}, logits of up to {height:.3g}, {logits.dtype}, in memory: "
        what += layouts.listed(layout)
        assert got["loss"].dtype == torch.float32, f"{what}: the loss is {got['loss'].dtype}, expected float32"
        close(
            got["loss"], want["loss"], plain["loss"], f"{what}, loss", factor=10,
            cause=f"softmax in float32 of {vocabulary} columns; the {missing} that pad them take no part",
        )  # fmt: skip
        true, yardstick = (F.pad(t["dlogits"], (0, missing)).chunk(size, -1)[index[rank]] for t in (want, plain))
        close(
            got["dlogits"], true, yardstick.to(logits.dtype), f"{what}, gradient of its logits", factor=10,
            dims="batch, token, column", cause="softmax − one-hot over the tokens' number; padding has none",
        )  # fmt: skip
    return ranks


@exercise(VOCAB, kind="numerics")
@pytest.mark.parametrize(("size", "missing", "grouped"), CASES)
@pytest.mark.parametrize("height", [1.0, 150.0])
def test_the_loss_is_that_of_the_whole_logits(run, rng, expect, size, missing, grouped, height):
    """e^150 overflows float32."""
    vocabulary, targets = draw(rng, size, missing)
    logits = rng.normal(*targets.shape, vocabulary) * height
    check_loss(run, rng, expect, logits, targets, size, missing, grouped)


@exercise(VOCAB, kind="numerics")
def test_float16_logits_are_summed_in_float32(run, rng, expect):
    """With small logits of a large vocabulary, the sum of exponentials is too large for float16 to add 1 to it."""
    vocabulary = 2 * 4100
    logits, targets = (rng.normal(1, 2, vocabulary) * 0.01).half(), rng.tokens(1, 2, vocabulary=vocabulary)
    check_loss(run, rng, expect, logits, targets, 2)


@exercise(VOCAB, kind="property")
def test_each_rank_keeps_its_share_of_the_rows(run, rng):
    rows, columns = rng.integers(4000, 4100), 1000
    sizes, small = ({"rows": 4 * n, "columns": columns} for n in (rows, 1))
    check_share_kept(run, "embedding", sizes, small, {"weight": [rows, columns]})


@exercise(VOCAB, kind="property")
def test_an_embedding_is_one_all_reduce_forward(run, rng, expect):
    y, ranks = check_embedding(run, rng, expect, 2, 0, grouped=False)
    check_sends(ranks, {"forward": [["all_reduce", y.numel()]], "backward": []}, cause="one number for each of y")


@exercise(VOCAB, kind="property")
def test_three_numbers_a_token_are_sent_and_no_logits_gathered(run, rng, expect):
    vocabulary, targets = draw(rng, size := rng.integers(2, 4), 0)
    logits = rng.normal(*targets.shape, vocabulary)
    for rank, got in enumerate(check_loss(run, rng, expect, logits, targets, size)):
        forward, backward = (got["sent"][part] for part in BOTH)
        ops, elements = {row["op"] for row in forward}, sum(row["elements"] for row in forward)
        sends(backward, [], f"rank {rank}, backward", "the gradient of its columns needs nobody")
        assert ops == {"all_reduce"}, f"rank {rank}: sent by {', '.join(sorted(ops)) or 'nothing'}, expected all_reduce"
        assert elements <= 3 * targets.numel(), (
            f"rank {rank}: {elements} elements reduced for {targets.numel()} tokens, expected three numbers a token: "
            "maximum, sum of exponentials, target's logit"
        )


@exercise(VOCAB, kind="property")
def test_no_rank_holds_the_whole_logits(run, rng):
    tokens, columns, seed = 256, rng.integers(8000, 8200), rng.integers(0, 10**6)

    def judge(ranks: list, *_) -> None:
        world = len(ranks)
        full = torch.cat([probes.logits_of(tokens, columns, seed, r) for r in range(world)], -1)
        want = full_loss(full, probes.targets_of(tokens, columns * world, seed), 1.0, "float32")
        sums = want["dlogits"].unflatten(-1, (world, columns)).sum(-1)
        for rank, got in enumerate(ranks):
            for name, true in (("loss", want["loss"]), ("sums", sums[..., rank])):
                error = float((got[name] - true).abs().max())
                assert error <= 1e-5, f"rank {rank} of {world}, {columns} columns each, {name}: off by {error:.3g}"

    part, cases = 4 * tokens * columns, [(2, [8, 8, seed]), (2, [tokens, columns, seed]), (8, [tokens, columns, seed])]
    check_no_growth(
        run, probes.large_loss, cases, judge, "the logits of six more ranks", 6 * part, 16 * part
    )  # fmt: skip
