"""Sharded layers in mixed precision.

Must hold: weights after some steps are those of float32 masters with 16-bit compute, as close to float64 as a plain run
of that kind. Messages are in 16 bits, gradients in the requested dtype. Shards and their gradients are float32. Layers
compute in 16 bits, in half the memory. Typical fakes: cast after the gather (caught by message dtypes); cast back and
compute in float32 (caught by output values and by bytes held); 16-bit masters (they lose small steps); autocast
(forbidden, and its messages are float32); sums that overflow in float16 (large gradients).
"""

import pytest
import torch

from lab.harness.judge import measured
from lab.harness.pytest_plugin import exercise

from . import oracles_fsdp as oracles
from . import probes_fsdp
from .messages_fsdp import check_messages, messages
from .oracles_fsdp import BLOCK, check_training, draw_plan, natural
from .probes_fsdp import DTYPES
from .weighed_fsdp import check_holds_part

MIXED = "zero.fsdp_mixed"


@exercise(MIXED, kind="numerics")
@pytest.mark.parametrize(
    ("world", "dtype", "reduce", "case"),
    [(1, "bfloat16", "float32", "tied"), (2, "float16", "float32", "frozen"), (3, "bfloat16", None, "checkpoint")],
)  # fmt: skip
def test_masters_are_those_of_one_process(run, rng, expect, world, dtype, reduce, case):
    plan = draw_plan(rng, **{case: True})
    options = {"compute_dtype": dtype} | ({"reduce_dtype": reduce} if reduce else {})
    orders = natural(plan, 3, rng.integers(1, 2))
    check_training(run, rng, "mixed", plan, orders, world, "sgd", options, reduced=dtype, expect=expect)


@exercise(MIXED, kind="numerics")
def test_only_the_ranks_of_its_group_are_averaged(run, rng):
    oracles.check_group_mean(run, rng, "mixed", {"compute_dtype": "float32"})


@exercise(MIXED, kind="numerics")
def test_every_argument_is_cast(run, rng):
    dtype = rng.choice(["float16", "bfloat16"])
    (got,) = run(probes_fsdp.cast_arguments, dtype, world=1)
    names, want = ["x", "pair[0]", "pair[1]", "named['some'][0]", "named['some'][1]"], [dtype] * 4 + ["int64"]
    bad = [f"{name} as {g}, expected {w}" for name, g, w in zip(names, got, want, strict=True) if g != w]
    assert not bad, (
        f"called as model(x, pair, named=named), a module got {'; '.join(bad)}: cast each float32 tensor, by place, by "
        "name (**kwargs) or in a container; the last is int64, and stays"
    )


@exercise(MIXED, kind="numerics")
def test_large_fp16_gradients_do_not_overflow(run, rng):
    oracles.check_fp16_mean(run, rng, "mixed", {"compute_dtype": "float16"})


@exercise(MIXED, kind="property")
@pytest.mark.parametrize(("dtype", "reduce"), [("float16", "bfloat16"), ("float16", "float32"), ("bfloat16", None)])
def test_messages_have_the_dtypes_that_were_asked_for(run, rng, dtype, reduce):
    plan, world = draw_plan(rng), rng.integers(2, 3)
    options = {"compute_dtype": dtype} | ({"reduce_dtype": reduce} if reduce else {})
    rough = "bfloat16" if "bfloat16" in (dtype, reduce) else dtype
    ranks = check_training(run, rng, "mixed", plan, natural(plan, 2), world, options=options, reduced=rough)
    check_messages(
        ranks, messages(plan, world, dtype=dtype, backward_dtype=reduce or dtype),
        "cast the shard before it is gathered, and the gradient before it is scattered; every layer is cut",
        plan, world,
    )  # fmt: skip
    for rank, got in enumerate(ranks):
        for out in got["evaluated"]:
            assert torch.equal(out, out.to(DTYPES[dtype]).float()), (
                f"rank {rank}: what the last layer computes are no numbers of {dtype}: its weights and inputs are to be"
            )
        for dtypes in got["dtypes"]:
            assert dtypes == ["torch.float32"], (
                f"rank {rank}: the shards' gradients are {dtypes}, expected float32, as the masters are"
            )


@exercise(MIXED, kind="property")
def test_layers_at_work_take_half_the_bytes(run, rng):
    world, plan, tokens = rng.integers(2, 3), oracles.big_plan(4), rng.tokens(1, vocabulary=128)
    ranks = oracles.held_and_baseline(run, "mixed", {"compute_dtype": "bfloat16"}, plan, tokens, world)
    for rank, (got, base) in enumerate(ranks):
        # Gloo's threads free messages late: some, of half a layer each, may still be alive.
        for moment, slack in (("between", 2 * BLOCK), ("forward", BLOCK)):
            extra, full = got[moment] - got["rest"], base[moment] - base["rest"]
            measured(f"held beside the masters, {moment}", extra, full / 2 + slack, "bytes", at_most=True)
            assert extra <= full / 2 + slack, (
                f"rank {rank} of {world}, {BLOCK} bytes of masters in a layer: {extra} bytes held beside the masters "
                f"({moment}), at most half of the {full} of FSDP and {slack} expected: what is gathered, and what "
                "autograd keeps, is in 16 bits"
            )
        for moment in ("rest", "gradients"):
            assert got[moment] <= base[moment] + 2 * BLOCK, (
                f"rank {rank} of {world}: {got[moment]} bytes held ({moment}), FSDP holds {base[moment]}: masters and "
                "their gradients, in float32, and nothing else"
            )


@exercise(MIXED, kind="property")
def test_a_layer_at_work_is_never_there_in_float32(run, rng):
    check_holds_part(run, rng, "mixed", "forward")
